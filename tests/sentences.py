"""The rule `sentences` written out token by token, from its definition in docs/composed-contexts.md."""

from __future__ import annotations

from collections.abc import Sequence

POWER, OPENING, LONGEST, SINKS = 1.0, 0.25, 64, 3


def sentences_of(texts: Sequence[str]) -> list[list[int]]:
    """Numbers of a document's tokens by sentence; ``texts``: what each token reads."""
    found: list[list[int]] = [[]]
    for t, text in enumerate(texts):
        if len(found[-1]) == LONGEST:
            found.append([])
        found[-1].append(t)
        stripped = text.rstrip()
        while stripped and stripped[-1] in "\"'”’»)]」』）】":
            stripped = stripped[:-1].rstrip()
        if "\n" in text or stripped.endswith((".", "!", "?", "。", "！", "？", "｡", "؟", "۔", "।", "။", "។")):
            found.append([])
    return [sentence for sentence in found if sentence]


def chosen(
    documents: Sequence[tuple[int, Sequence[Sequence[int]]]],
    kept: Sequence[set[int]],
    sensitivity: dict[int, float],
    attention: dict[int, float],
    share: float,
    first: int,
    top_p: float | None = None,
    least: float = 0.0,
    most: int | None = None,
) -> list[int]:
    """Positions, ascending. ``documents``: first position and sentences, tokens counted in the document;
    ``kept``: positions by layer; ``sensitivity`` and ``attention`` by position; ``first``: tokens that every
    document gets, as far as the share goes; with ``top_p`` as many sentences as hold it, between the shares
    ``least`` and ``share``; ``most``: tokens in any case."""
    weight = {
        p: sum(p in row for row in kept) / len(kept)
        for start, parts in documents
        for part in parts
        for p in (start + t for t in part)
    }
    seen = {start + t for start, parts in documents for part in parts for t in part if t >= SINKS}
    looked_at = {p: attention.get(p, 0.0) if p in seen and weight[p] else 0.0 for p in weight}
    blind = not any(looked_at.values())
    scores: dict[int, float] = {}
    for start, parts in documents:
        for number, part in enumerate(parts):
            live = [start + t for t in part if weight[start + t]]
            if not live:
                continue
            relevance = max(looked_at[p] for p in live)
            if number == 0:
                relevance = max(
                    relevance, OPENING * max(looked_at[start + t] for sentence in parts for t in sentence)
                )
            mean = sum(sensitivity[p] * weight[p] for p in live) / len(live)
            scores.update(dict.fromkeys(live, mean * (1.0 if blind else relevance**POWER)))
    tokens = round(sum(weight.values()))
    count = min(tokens, max(1, round(share * tokens))) if tokens else 0
    count = count if most is None else min(count, most)
    openings = {
        start + t for start, _ in documents for t in range(min(first, count // len(documents)))
    } & set(scores)
    if top_p is not None:
        live_parts = [
            live
            for start, parts in documents
            for part in parts
            if (live := [p for t in part if (p := start + t) in scores])
        ]
        total, held, holding = sum(scores.values()), 0.0, set(openings)
        for live in sorted(live_parts, key=lambda live: (-scores[live[0]], live[0])):
            if held >= top_p * total:
                break
            held += sum(scores[p] for p in live)
            holding |= set(live)
        floor = min(tokens, max(1, round(least * tokens))) if tokens else 0
        count = min(count, max(floor, len(holding)))
    rest = sorted(set(scores) - openings, key=lambda p: (-scores[p], p))
    return sorted(openings | set(rest[: count - len(openings)]))
