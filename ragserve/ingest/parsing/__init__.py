"""Parser worker processes."""
