"""Offloaded requests: the prompt's KV in host memory, chosen pages of it in resident blocks on the device."""
