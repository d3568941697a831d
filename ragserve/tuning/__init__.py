"""The engine process of `ragserve tune`."""
