"""Measurements of this repository: run one as `python -m benchmarks.NAME`."""
