"""Sparse decoding: page statistics, page selection, and the attention backend."""
