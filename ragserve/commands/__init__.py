"""The commands, a module each with ``register(app)``."""
