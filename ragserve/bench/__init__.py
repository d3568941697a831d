"""Benchmarks: each measures beside its rival in the same run and writes JSON, see `ragserve bench`."""
