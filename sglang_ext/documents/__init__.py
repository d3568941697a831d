"""The hierarchical document cache: GPU, host and disk, see README.md."""
