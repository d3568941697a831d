"""Filling a request's slots with documents' KV."""
