"""Composed contexts that offloaded requests read in their documents' host pages."""
