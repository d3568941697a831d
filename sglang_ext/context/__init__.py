"""Strategies that compose contexts; nothing yet, see README.md."""
