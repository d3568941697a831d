"""ragserve: retrieval-augmented generation served by SGLang. Importing this package imports no torch."""

__version__ = "0.1.0"
