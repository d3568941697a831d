"""What a session keeps of the turns that were answered, and what computes their KV again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ragserve.answering.prompt import Message, Prompt
from ragserve.answering.results import RetrievedPassage
from ragserve.engine.base import GenerateRequest, Sampling
from sglang_ext.wire.protocol import SessionPart, Span


@dataclass(frozen=True, slots=True)
class PastTurn:
    """A part of a dialogue's prompt: a turn, or earlier turns that were compressed into one text.

    Args:
        ids: Token ids behind those of the part before, with the answer's.
        asked: How many of them were in the turn's prompt; behind them is the answer.
        spans: Places in ``ids``: what precedes the documents (in the first part the system text), and each
            document.
        unregistered: As in `GenerateRequest`.
        owners: Likewise, for ``spans``.
        passages: The documents, as they stand in ``ids``.
        question: As it was asked.
        history: Messages before the question, which came with the first turn.
        is_text: The KV of ``ids`` is computed in one piece, over the system text; nothing of it is composed.
    """

    ids: Sequence[int]
    asked: int
    spans: tuple[Span, ...]
    unregistered: Sequence[int] = ()
    passages: tuple[RetrievedPassage, ...] = ()
    question: str = ""
    history: tuple[Message, ...] = ()
    is_text: bool = False
    owners: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        prompt: Prompt,
        answer: Sequence[int],
        *,
        behind: int,
        unregistered: Sequence[int] = (),
        owners: tuple[str, ...] = (),
    ) -> PastTurn:
        """The turn that a prompt asked, without its texts. ``behind``: tokens of the dialogue before it;
        ``answer``: its ids; ``owners``: of the prompt's spans."""
        head, *documents = prompt.spans
        spans = [Span(each.start - behind, each.end - behind) for each in documents if each.start >= behind]
        asked = len(prompt.input_ids) - behind
        ids = [*prompt.input_ids[behind:], *answer]
        return cls(ids, asked, (Span(0, max(0, head.end - behind)), *spans), unregistered, owners=owners)

    @property
    def answer(self) -> Sequence[int]:
        """Token ids of the answer."""
        return self.ids[self.asked :]


def ids_of(turns: Sequence[PastTurn]) -> list[int]:
    """Token ids of a dialogue."""
    return [token for turn in turns for token in turn.ids]


def as_text(turns: Sequence[PastTurn]) -> PastTurn:
    """Turns, the dialogue's first ones, as one text whose KV is computed in one piece, exactly."""
    ids, first = ids_of(turns), turns[0]
    unregistered = [n for n in first.unregistered if n == 0]
    return PastTurn(ids, len(ids), first.spans[:1], unregistered, is_text=True, owners=first.owners[:1])


@dataclass(frozen=True, slots=True)
class Composed:
    """A request that composes the KV of the first turns again. ``end``: tokens of its prompt; ``held``: those
    that the session's key must have before it; ``leaves``: those that it must have behind it."""

    end: int
    spans: tuple[Span, ...]
    held: int
    unregistered: Sequence[int]
    leaves: int
    owners: tuple[str, ...]


class SessionKv:
    """The KV of a dialogue of ``turns`` under a session's ``key``: how much of it a composed turn needs, and
    what computes that again."""

    def __init__(self, turns: Sequence[PastTurn], key: str, *, exact: int = 0) -> None:
        """``exact``: how many of the turns, the first ones, are computed as one text: nothing of them is
        composed. The key must not have their KV composed."""
        turns = [as_text(turns[:exact]), *turns[exact:]] if exact else turns
        self._ids = ids_of(turns)
        self._key = key
        self._composed = list(_composed(turns))

    @property
    def held(self) -> int:
        """Tokens up to the end of the last document, or of text that was compressed: what only the session's
        KV has."""
        return self._composed[-1].leaves if self._composed else 0

    def request(self, request: GenerateRequest) -> GenerateRequest:
        """The request as the dialogue's next turn."""
        earlier = self._remaker(len(self._composed), request)
        return replace(request, session=SessionPart(self._key, self.held), earlier=earlier)

    def _remaker(self, count: int, request: GenerateRequest) -> Callable[[], GenerateRequest] | None:
        """Make the maker of the request that computes the first ``count`` of the composed turns again."""
        if not count:
            return None
        turn, ids = self._composed[count - 1], self._ids
        earlier = self._remaker(count - 1, request)

        def make() -> GenerateRequest:
            return replace(
                request,
                rid=f"{request.rid}-turn{count}",
                input_ids=ids[: turn.end],
                sampling=Sampling(max_new_tokens=1),
                spans=turn.spans,
                unregistered=turn.unregistered,
                owners=turn.owners,
                session=SessionPart(self._key, turn.held),
                earlier=earlier,
                decode={},
            )

        return make


def _composed(turns: Sequence[PastTurn]) -> Iterator[Composed]:
    """The turns that brought documents, and the first one."""
    start = held = 0
    for number, turn in enumerate(turns):
        if number == 0 or len(turn.spans) > 1:
            head, *documents = (Span(start + span.start, start + span.end) for span in turn.spans)
            spans = (Span(0, head.end), *documents)
            end = start + turn.asked
            leaves = end if turn.is_text else spans[-1].end
            yield Composed(end, spans, held, turn.unregistered, leaves, turn.owners)
            held = leaves
        start += len(turn.ids)
