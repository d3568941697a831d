"""KV pools: quantised, and the second pool of streaming heads."""
