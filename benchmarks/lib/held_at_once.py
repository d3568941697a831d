"""When as many requests of a run decoded at once as ever did, and what they answered then."""

from __future__ import annotations

from ragserve.verification.engine_run import TimedAnswer

SHORTEST_S = 0.25  # of a time in which as many decode at once as ever do


def overlap(spans: list[tuple[float, float]]) -> tuple[int, list[tuple[float, float]]]:
    """Return the most spans at a time, and when there are as many: again and again where others wait. Of
    these the longest, and those of `SHORTEST_S` at least: shorter ones hold few tokens."""
    events = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    most = now = 0
    found: list[tuple[float, float]] = []
    since = 0.0
    for at, change in events:
        if now == most and change < 0:
            found.append((since, at))
        now += change
        if now > most:
            most, found = now, []
        if now == most:
            since = at
    longest = max((end - begin for begin, end in found), default=0.0)
    return most, [span for span in found if span[1] - span[0] >= min(longest, SHORTEST_S)]


def tokens_between(answer: TimedAnswer, since: float, until: float) -> int:
    counts = [chunk.usage.completion for at, chunk in answer.chunks if since <= at <= until]
    return counts[-1] - counts[0] if counts else 0
