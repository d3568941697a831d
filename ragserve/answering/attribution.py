"""What an answer rests on, as its results say it."""

from __future__ import annotations

from collections.abc import Sequence

from ragserve.answering.citations import Basis, Marker
from ragserve.answering.results import AnswerSentence, Citation, RetrievedPassage
from ragserve.answering.support import attribute


def attributed(
    answer: str, markers: Sequence[Marker], question: str, passages: Sequence[RetrievedPassage]
) -> tuple[list[AnswerSentence], list[Citation]]:
    """The answer's sentences with their passages, and the passages that any of them cites, each once.

    A passage that several sentences cite is cited for the strongest reason: a marker, then a quote."""
    found = attribute(answer, markers, question, [(each.title, each.text) for each in passages])
    sentences = [
        AnswerSentence(
            start=each.start,
            end=each.end,
            supported=each.supported,
            passages=list(each.passages),
            basis=each.basis,
        )
        for each in found
    ]
    reasons: dict[int, Basis] = {}
    for basis in ("words", "quote", "marker"):  # the later ones replace the earlier ones
        reasons |= {index: each.basis for each in found if each.basis == basis for index in each.passages}
    return sentences, [
        Citation(basis=reasons[index], **passages[index - 1].model_dump(exclude={"metadata"}))
        for index in sorted(reasons)
    ]
