"""Ask the engine what a question attends to in the earlier turns of a session, where their KV lies."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from ragserve.answering.prompt import PromptBuilder
from ragserve.answering.sessions.past_turns import PastTurn, ids_of
from ragserve.answering.sessions.turn_candidates import TurnCandidates
from ragserve.engine.base import Engine
from ragserve.engine.document_cache import CachingEngine
from ragserve.errors import RagserveError

log = logging.getLogger(__name__)
_MAX_TOKENS = 131_072  # of the prompts that are asked about: bounds the message to the engine

AskedPrompts = Sequence[Sequence[PastTurn]]
"""For each turn of a session the dialogue as its prompt had it, and the turn itself with its answer."""


class TurnAttention:
    """Asks one engine, by its control operation `attend`. An engine without keys of ours, or one that fails,
    leaves the choice to words."""

    def __init__(self, engine: Engine, builder: PromptBuilder) -> None:
        self._engine, self._builder = engine, builder

    async def of(
        self, candidates: TurnCandidates, question: str, key: str, prompts: AskedPrompts
    ) -> TurnCandidates:
        """The candidates with signal `attention`, where the session with this ``key`` still holds the KV of
        their ``prompts``. Never raises a RagserveError: the turn can be answered without."""
        engine = self._engine
        if candidates.sentences is None or not isinstance(engine, CachingEngine) or engine.info.only_exact:
            return candidates
        tail = self._builder.follow_up([], question, (), max_prompt_tokens=sys.maxsize).input_ids
        asked, parts, places = _request(candidates, prompts)
        if not parts:
            return candidates
        try:
            answer = await engine.control("attend", key=key, prompts=asked, question=tail, parts=parts)
        except RagserveError as error:
            log.warning("earlier turns are chosen by words alone: %s", error)
            return candidates
        found: list[Sequence[float] | None] = [None] * len(candidates.sources)
        for (number, has_head), values in zip(places, answer["attention"], strict=True):
            found[number] = values if values is None else values[has_head:]
        return candidates.attended(found)


def _request(
    candidates: TurnCandidates, prompts: AskedPrompts
) -> tuple[list[list[int]], list[list[Any]], list[tuple[int, int]]]:
    """Token ids of the prompts, the last one last; the parts as `attend` takes them; and of each the number
    of its source, and how many of its sentences stand before the source's body."""
    longest = _longest(prompts)
    numbers = {longest[source.turn + 1] for source in candidates.sources} | {len(prompts) - 1}
    used = _newest(sorted(numbers), prompts)
    parts: list[list[Any]] = []
    places: list[tuple[int, int]] = []
    for number, (source, begins) in enumerate(zip(candidates.sources, candidates.begins(), strict=True)):
        # the next prompt has all of a turn; its own ends before the last token of the answer
        before, turn = prompts[source.turn + 1][:-2], prompts[source.turn + 1][-2]
        place = source.place(turn)
        if place is None or not begins or longest[source.turn + 1] not in used:
            continue
        (span, at), start = place, sum(len(each.ids) for each in before)
        body = [at + begin for begin in begins]
        parts.append(
            [
                used.index(longest[source.turn + 1]),
                start + span.start,
                start + span.end,
                [0, *body] if at else body,
            ]
        )
        places.append((number, int(at > 0)))
    return [ids_of(prompts[number]) for number in used], parts, places


def _newest(numbers: Sequence[int], prompts: AskedPrompts) -> list[int]:
    """The last of these prompts that have `_MAX_TOKENS` together, the very last one in any case."""
    kept: list[int] = []
    left = _MAX_TOKENS
    for number in reversed(numbers):
        left -= sum(len(turn.ids) for turn in prompts[number])
        if kept and left < 0:
            break
        kept.insert(0, number)
    return kept


def _longest(prompts: AskedPrompts) -> list[int]:
    """For each prompt the number of the last one that goes on from it, token by token."""
    found = list(range(len(prompts)))
    for number, (one, other) in reversed(list(enumerate(pairwise(prompts)))):
        if all(a is b for a, b in zip(one, other, strict=False)) and len(one) < len(other):
            found[number] = found[number + 1]
    return found
