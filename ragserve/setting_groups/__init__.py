"""The groups of the settings, which `ragserve.config.Settings` joins, and what does not go together."""
