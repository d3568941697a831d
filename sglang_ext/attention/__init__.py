"""Sparse decoding and prefill inside SGLang, offloaded attention, and KV pools. See README.md."""
