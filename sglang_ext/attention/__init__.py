"""Attention backends inside SGLang: the CPU platform's; sparse decoding comes later, see README.md."""
