"""The product's side of the document cache: warm-up, evictions, the cache folder and its lock."""
