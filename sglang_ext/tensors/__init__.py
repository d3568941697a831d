"""Device buffers, rotary embedding and joined launches that several packages share."""
