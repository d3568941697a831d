"""Recomputing the KV of chosen tokens in their new context."""
