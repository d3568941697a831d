"""Attention of offloaded requests."""
