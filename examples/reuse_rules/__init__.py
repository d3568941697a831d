"""Which tokens of reused documents must be computed again? Run it: `python -m examples.reuse_rules --help`."""
