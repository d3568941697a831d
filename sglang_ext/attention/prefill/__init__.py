"""Sparse and dense prefill kernels, and what chooses their blocks."""
