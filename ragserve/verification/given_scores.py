"""The retriever's scores of given documents, each embedded as a chunk is at ingestion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ragserve.answering.results import RetrievedPassage
from ragserve.answering.scores import retrieval_scores
from ragserve.ingest.chunk_embedding import embedding_text
from ragserve.ingest.sentence_plan import SentencePlan
from ragserve.retrieval.retriever import scored
from sglang_ext.wire.protocol import RetrievalScores

if TYPE_CHECKING:
    from ragserve.answering.prompt import Prompt, PromptBuilder
    from ragserve.retrieval.embedder import AnyEmbedder


class TitledText(Protocol):
    """A document's title and text."""

    @property
    def title(self) -> str: ...
    @property
    def text(self) -> str: ...


class GivenScores:
    """Scores of some documents for any question."""

    def __init__(
        self,
        builder: PromptBuilder,
        embedder: AnyEmbedder,
        documents: Sequence[TitledText],
        sentence_bytes: int,
    ) -> None:
        """``sentence_bytes``: the setting."""
        self._builder, self._embedder, self._documents = builder, embedder, documents
        plan = SentencePlan(
            [(d.text, builder.count(d.text)) for d in documents], embedder.dim, sentence_bytes
        )
        self._passages = embedder.encode([embedding_text(d.title, d.text) for d in documents])
        self._sentences = plan.vectors(embedder.encode(plan.texts))
        self._asked: dict[str, Any] = {}  # vectors by question

    def nearest(self, question: str, k: int) -> list[int]:
        """The numbers of the ``k`` documents that are nearest to a question, the nearest first."""
        order = (-(self._passages @ self._vector(question))).argsort(kind="stable")
        return [int(number) for number in order[:k]]

    def cosines(self, question: str, numbers: Sequence[int]) -> list[float]:
        """Cosines of a question and some of the documents."""
        vector = self._vector(question)
        return [float(self._passages[number] @ vector) for number in numbers]

    def of(self, question: str, prompt: Prompt, shown: Sequence[int] | None = None) -> RetrievalScores | None:
        """The scores for ``question``, of the documents that its ``prompt`` has: the numbers ``shown``, or
        all."""
        vector = self._vector(question)
        numbers = range(len(self._documents)) if shown is None else shown
        passages = [
            RetrievedPassage(
                index=place,
                title=self._documents[number].title,
                text=self._documents[number].text,
                cosine=float(self._passages[number] @ vector),
            )
            for place, number in enumerate(numbers, 1)
        ]
        own = [self._sentences[number] for number in numbers]
        sentences = [[] if each is None else scored(each, vector) for each in own]
        return retrieval_scores(self._builder, prompt, passages, sentences)

    def _vector(self, question: str) -> Any:
        if question not in self._asked:
            [self._asked[question]] = self._embedder.encode_queries([question])
        return self._asked[question]
