"""Agreement among tensor-parallel ranks, and what happens when one fails."""
