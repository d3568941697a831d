"""The registry in a Postgres database, for several servers."""
