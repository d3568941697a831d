"""The hierarchical document cache; nothing yet, see README.md."""
