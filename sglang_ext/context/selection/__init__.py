"""What of the documents is kept, and what of it is recomputed."""
