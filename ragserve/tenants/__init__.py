"""Tenants: API keys with rights and limits, and the audit log. Imports nothing of the server."""
