"""The retriever's scores of a question set's documents, each embedded as a chunk is at ingestion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ragserve.answering.results import RetrievedPassage
from ragserve.answering.scores import retrieval_scores
from ragserve.ingest.chunk_embedding import embedding_text
from ragserve.ingest.sentence_plan import SentencePlan
from ragserve.retrieval.retriever import scored
from sglang_ext.protocol import RetrievalScores

if TYPE_CHECKING:
    from ragserve.answering.prompt import Prompt, PromptBuilder
    from ragserve.eval.data import GivenPassage
    from ragserve.retrieval.embedder import Embedder


class GivenScores:
    """Scores of some documents for any question."""

    def __init__(
        self,
        builder: PromptBuilder,
        embedder: Embedder,
        documents: Sequence[GivenPassage],
        sentence_bytes: int,
    ) -> None:
        """``sentence_bytes``: the setting."""
        self._builder, self._embedder, self._documents = builder, embedder, documents
        plan = SentencePlan(
            [(d.text, builder.count(d.text)) for d in documents], embedder.dim, sentence_bytes
        )
        self._passages = embedder.encode([embedding_text(d.title, d.text) for d in documents])
        self._sentences = plan.vectors(embedder.encode(plan.texts))

    def of(self, question: str, prompt: Prompt) -> RetrievalScores | None:
        """The scores for ``question``, of the documents that its ``prompt`` has."""
        [vector] = self._embedder.encode_queries([question])
        passages = [
            RetrievedPassage(index=i, title=d.title, text=d.text, cosine=float(own @ vector))
            for i, (d, own) in enumerate(zip(self._documents, self._passages, strict=True), 1)
        ]
        sentences = [[] if own is None else scored(own, vector) for own in self._sentences]
        return retrieval_scores(self._builder, prompt, passages, sentences)
