"""Sparse decoding, sparse prefill, attention to offloaded KV, and KV pools, inside SGLang. See README.md."""
