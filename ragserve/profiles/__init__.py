"""Plain data that `ragserve serve` reads: what was measured of a model on this machine. Imports no engine."""
