"""Compare composed strategies with full prefill, for `ragserve tune` and in an idle server, and measure what
their records need: costs, distributions, answers' scores.
"""

MAX_TOKENS = 32  # of an answer that is compared
MOST_QUESTIONS = 2_500  # of a namespace
