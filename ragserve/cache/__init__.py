"""The product's side of the KV cache: warm-up, evictions, the cache folder and its lock."""
