"""The remote tier: documents in a store that engines share."""
