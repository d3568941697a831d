"""Compare composed strategies with full prefill, for `ragserve tune` and in an idle server, and measure what
their records need: costs, distributions, answers' scores.
"""

MAX_TOKENS = 64  # of an answer that is compared
MOST_QUESTIONS = 400  # of a namespace
