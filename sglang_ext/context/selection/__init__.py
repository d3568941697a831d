"""Choice of the context tokens to keep and of those to compute again."""
