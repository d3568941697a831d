"""Compare composed strategies with full prefill: for `ragserve tune`, and in a server while it is idle."""
