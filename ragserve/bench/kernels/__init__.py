"""Benchmarks of the Triton kernels."""
