"""Compare composed strategies with full prefill: for `ragserve tune`, and in a server while it is idle."""

MAX_TOKENS = 64  # of an answer that is compared
MOST_QUESTIONS = 400  # of a namespace
