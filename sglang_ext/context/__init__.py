"""Strategies that compose contexts out of cached documents, see README.md."""
