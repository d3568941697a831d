"""Pages of documents: their types, their format, and the host tier."""
