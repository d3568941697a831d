"""Trains a model to read documents that were prefilled apart: `ragserve adapt`."""
