"""The registry as an SQLite file in the data directory."""
