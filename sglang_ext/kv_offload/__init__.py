"""Hosted requests: the prompt's KV in host memory, chosen pages of it in columns on the device."""
