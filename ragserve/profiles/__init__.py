"""Measured profiles of a model on this machine, as plain data that `ragserve serve` reads. Imports no
engine."""
