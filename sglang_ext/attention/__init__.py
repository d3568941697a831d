"""Attention backends inside SGLang: sparse decoding, and the CPU platform's. See README.md."""
