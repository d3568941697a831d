"""Helpers that benchmarks, evaluation and calibration share."""
