"""Host pages of offloaded requests, and copies to and from them."""
