"""Figures about the process itself: compiled kernels, traced distributions."""
