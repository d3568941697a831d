"""Result types of a query, shared by the JSON answer, the SSE events and the OpenAI route."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from ragserve.answering.citations import Basis
from ragserve.setting_groups.answering import FollowUps, Retrieval
from sglang_ext.wire.protocol import ContextReport, DecodeReport, PrefillReport

if TYPE_CHECKING:
    from ragserve.retrieval.passage_search import FoundPassage

Overflow = Literal["refuse", "drop", "cut"]
"""The fate of given documents that do not fit into the context."""


class Result(BaseModel):
    model_config = ConfigDict(frozen=True, protected_namespaces=())


def said(report: type, name: str, default: Any = ..., *, also: str = "") -> Any:
    """Make a field with the text that the engine's report declares for it, and ``also`` behind it."""
    declared = {each.name: each.metadata["doc"] for each in fields(report)}
    return Field(default, description=f"{declared[name]} {also}".rstrip())


BASES = (
    "`marker`, the answer names it; `quote`, it contains the sentence word for word; `words`, it has the "
    "sentence's names, numbers and other words, and those of the question"
)


class Passage(Result):
    """A piece of context. Fields of indexed passages are null for documents given in the request."""

    index: int = Field(description="Number in the prompt, from 1; markers `[n]` in the answer refer to it.")
    namespace: str | None = Field(default=None, description="Namespace of the document.")
    doc_id: str | None = Field(default=None, description="Document in the registry.")
    chunk_id: int | None = Field(default=None, description="Chunk in the registry.")
    source: str | None = Field(
        default=None, description="Path, URL or name under which the document was ingested."
    )
    title: str = Field(description="Title of the document.")
    page: int | None = Field(
        default=None,
        description="Page, slide, sheet, chapter, message or section, from 1, where the format has them.",
    )
    first_page: int | None = Field(
        default=None,
        description="The page before, if `text` begins with a sentence that goes on from there; else `page`.",
    )
    page_kind: str | None = Field(
        default=None,
        description="Which of these: `page`, `slide`, `sheet`, `chapter`, `message` or `section`.",
    )
    page_name: str | None = Field(default=None, description="Name of the sheet, chapter or section.")
    start: int | None = Field(default=None, description="First character in the document's text.")
    end: int | None = Field(default=None, description="Character after the last one.")
    header_chars: int = Field(
        default=0,
        description="Characters at the beginning of `text` that copy the header of the table, or the "
        "beginning of the sentence, that the passage continues; the rest is the document's text from `start` "
        "to `end`.",
    )
    edited: bool = Field(
        default=False,
        description="Somebody edited the text, which is not the document's from `start` to `end`.",
    )
    score: float | None = Field(
        default=None,
        description="Score that the search orders passages by, higher is better. By `retrieval`: `dense`, "
        "the cosine; `lexical`, BM25; `hybrid`, the sum of both, each in standard deviations from its mean "
        "over the candidates.",
    )
    cosine: float | None = Field(
        default=None,
        description="Cosine similarity of question and passage; null in a lexical search.",
    )
    bm25: float | None = Field(
        default=None,
        description="BM25 of question and passage; null if the lexical search did not find it.",
    )
    search_rank: int | None = Field(
        default=None, description="Place in the search's order, from 1; null if nothing was reranked."
    )
    rerank_score: float | None = Field(
        default=None,
        description="The reranker's score; null without one, for a passage that it cannot score, and for "
        "neighbours of found passages, which have no scores at all.",
    )
    text: str = Field(description="The passage itself.")


class RetrievedPassage(Passage):
    """A search result, with its document's metadata."""

    metadata: dict[str, Any] = Field(default_factory=dict, description="The document's metadata.")


class Citation(Passage):
    """A passage that supports the answer."""

    basis: Basis = Field(description=f"Why it is cited: {BASES}.")


class AnswerSentence(Result):
    """A sentence of the answer, and the passages that it rests on."""

    start: int = Field(description="Its first character in `answer`.")
    end: int = Field(description="The character after its last one.")
    supported: bool = Field(
        description="Whether a passage supports it, by its words; also where it names passages itself."
    )
    passages: list[int] = Field(description="Their `index`, ascending; empty: it has no citation.")
    basis: Basis | None = Field(description=f"Why they are cited: {BASES}; null without any.")


class AnswerEvidence(Result):
    """Whether the passages seem to answer the question."""

    likely: bool
    score: float = Field(description="Negative where it is not likely; it has no unit.")
    reason: str = Field(description="What speaks most against an answer; empty if it is likely.")


EVIDENCE = (
    "Whether the passages seem to answer the question; null with `not_found` `off`, for follow-ups that are "
    "searched for with the turn before, for given documents, and for an embedder without a threshold."
)


class Usage(Result):
    """Tokens counted by the engine."""

    prompt: int = Field(description="Tokens of the prompt.")
    cached: int = Field(description="Prompt tokens found in the exact prefix cache.")
    completion: int = Field(description="Tokens generated.")


class ContextUse(Result):
    """Use of the documents between retrieval and decoding."""

    strategy: str = Field(
        description="Strategy that answered: `full` (all prefilled), `prefix` (SGLang's cache) and "
        "`passages` (the best passages, as `prefix`) are exact, others are composed."
    )
    choice: str | None = Field(
        default=None, description="Strategy `auto`: the chosen strategy with its options, and the reason."
    )
    documents_retrieved: int = Field(description="Passages found or given.")
    documents_kept: int = Field(description="Passages in the prompt; others were left out, see `notes`.")
    tokens_retrieved: int = Field(
        description="Document tokens found or given; in a session those of new passages, as below."
    )
    tokens_kept: int = said(ContextReport, "kept")
    tokens_recomputed: int = said(ContextReport, "recomputed")
    tokens_by_tier: dict[str, int] = said(
        ContextReport,
        "by_tier",
        also="`session`: tokens of a session's earlier turns, with their questions and answers, that it "
        "held.",
    )
    notes: list[str] = Field(
        default_factory=list, description="Remarks for the caller, e.g. dropped documents."
    )


class DecodeUse(Result):
    """Pages read by the decode steps, with sparse decoding."""

    mode: str = said(DecodeReport, "mode")
    steps: int = said(DecodeReport, "steps")
    sparse_steps: int = said(DecodeReport, "sparse_steps")
    pages: float = said(DecodeReport, "pages")
    share: float = said(DecodeReport, "share")
    weight: float | None = said(DecodeReport, "weight")
    lag: int = said(DecodeReport, "lag")
    offloaded_steps: int = said(DecodeReport, "offloaded_steps")
    hits: int = said(DecodeReport, "hits")
    misses: int = said(DecodeReport, "misses")
    fills: int = said(DecodeReport, "fills")
    host_reads: int = said(DecodeReport, "host_reads")
    loaded_bytes: int = said(DecodeReport, "loaded_bytes")
    resident_blocks: int = said(DecodeReport, "resident_blocks")
    working_set: float = said(DecodeReport, "working_set")
    resumed: int = said(DecodeReport, "resumed")
    segmented_tokens: int = said(DecodeReport, "segmented_tokens")


TurnRule = Literal["words", "attention", "mixed"]


class EarlierTurn(Result):
    """What a prompt has of an earlier turn of its session, the turn's passages included."""

    turn: int = Field(description="Its number, from 1.")
    tokens: int = Field(description="Tokens of the turn, without the system text.")
    tokens_kept: int = Field(description="Of these, tokens that are in the prompt.")
    rule: TurnRule | None = Field(
        default=None,
        description="What its sentences were chosen by: `words`; `attention` and words; or `mixed`, words "
        "alone where the engine no longer had their KV. Null where none was chosen.",
    )
    tokens_by_signal: dict[str, int] | None = Field(
        default=None,
        description="Tokens of the sentences that stay, by the signal that speaks most for each: `words`, "
        "`attention`, `feedback` (what the best ones lead to), or `room` where none does.",
    )
    reason: str = Field(description="Why so many.")


class PrefillUse(Result):
    """What a sparse prefill computed."""

    mode: str = said(PrefillReport, "mode")
    alpha: float = said(PrefillReport, "alpha")
    tokens: int = said(PrefillReport, "tokens")
    share: float = said(PrefillReport, "share")
    reused_lines: float = said(PrefillReport, "reused_lines")
    new_lines: float = said(PrefillReport, "new_lines")


class SessionUse(Result):
    """What a turn found of its session. Figures are of the moment after the answer."""

    id: str = Field(description="Give it as `session` to go on.")
    turn: int = Field(description="Number of this turn, from 1.")
    expires_in_s: float = Field(description="Seconds after which the session ends, without another turn.")
    documents: int = Field(description="Passages in the session's context.")
    documents_added: int = Field(description="Of these, passages that this turn has added.")
    documents_known: int = Field(description="Passages that were found again, and are not added twice.")
    tokens: int = Field(description="Tokens of the dialogue with its passages and this answer.")
    tokens_held: int = Field(description="Tokens of earlier turns whose KV was there when the turn came.")
    tokens_computed: int = Field(
        description="Tokens of earlier turns that were computed again, or composed again of documents."
    )
    earlier: list[EarlierTurn] | None = Field(
        default=None, description="What is left of each earlier turn, with a `session_budget`; null without."
    )
    refreshed: bool = Field(
        default=False,
        description="The KV of all earlier turns was computed anew, exactly (`session_refresh_turns`).",
    )


class RetrievalTimings(Result):
    """Milliseconds. Null if a stage did not run."""

    rewrite_ms: float | None = Field(
        default=None, description="Rewriting a follow-up, whether or not the rewrite was used."
    )
    embed_ms: float | None = Field(
        default=None, description="Embedding the question, including the wait for a batch."
    )
    search_ms: float | None = Field(default=None, description="Searching the index and reading the passages.")
    rerank_ms: float | None = Field(default=None, description="Scoring the candidates again.")


class Timings(RetrievalTimings):
    """Milliseconds. Null if a stage did not run or the engine does not report it."""

    documents_tokens: int | None = Field(
        default=None, description="Tokens of the documents that documents_ms computed."
    )

    prompt_ms: float | None = Field(default=None, description="Laying out the prompt.")
    documents_ms: float | None = Field(
        default=None,
        description="Composed: until documents that were in no tier of the cache were computed; queue_ms and "
        "the others follow it.",
    )
    load_ms: float | None = said(ContextReport, "load_ms", None)
    compose_ms: float | None = said(ContextReport, "compose_ms", None)
    recompute_ms: float | None = said(ContextReport, "recompute_ms", None)
    queue_ms: float | None = Field(default=None, description="Waiting in the engine's queue.")
    prefill_ms: float | None = Field(default=None, description="Prefill, as reported by the engine.")
    ttft_ms: float | None = Field(
        default=None, description="From the request's arrival to the first generated token."
    )
    engine_ms: float | None = Field(
        default=None, description="From handing the prompt to the engine to its last token."
    )
    total_ms: float = Field(description="From the request's arrival to the complete answer.")


class Correction(Result):
    """A word that was taken for another one."""

    original: str
    replacement: str
    read: bool = Field(
        default=False,
        description="Whether the model reads the replacement: one of the passages has the word. If not, the "
        "word was only searched for.",
    )


class SearchedFor(Result):
    """What a question was searched for as."""

    question: str = Field(
        description="The question that was searched for; rewritten with `rewrite`, and corrected."
    )
    variants: list[str] = Field(
        description="With `context`: texts that were searched for along with it, and count half in all."
    )
    follow_up: FollowUps | None = Field(
        description="What was done, see the request's `follow_ups`; null if there are no earlier turns."
    )
    note: str | None = Field(default=None, description="Why the question was not rewritten.")
    corrections: list[Correction] = Field(
        default_factory=list,
        description="Typing errors that were corrected, in the question and in the user's earlier ones.",
    )
    model_reads: str | None = Field(
        default=None,
        description="The question as the model reads it; null if it reads what was typed.",
    )


class Candidate(Result):
    """A candidate of a reranking."""

    chunk_id: int
    search_rank: int = Field(description="Place in the search's order, from 1.")
    rank: int = Field(description="Place after reranking, from 1.")
    score: float | None = Field(
        description="The reranker's score; null: it has none, and the passage keeps its place."
    )


class Reranking(Result):
    """What a reranker did."""

    by: str = Field(description="`keys`, or the name of a CrossEncoder or a remote reranker.")
    scored: int = Field(description="Candidates that have a score.")
    candidates: list[Candidate] = Field(description="All candidates, best first, without near copies.")
    note: str | None = Field(default=None, description="Why candidates have no score.")

    @classmethod
    def of(cls, name: str, reranked: Sequence[FoundPassage], why_not: str | None = None) -> Self:
        """What reranker ``name`` did with candidates, in their new order. ``why_not``: it gave no scores."""
        candidates = [
            Candidate(
                chunk_id=each.chunk.chunk_id,
                search_rank=each.search_rank or rank,
                rank=rank,
                score=each.rerank_score,
            )
            for rank, each in enumerate(reranked, 1)
        ]
        scored = sum(each.score is not None for each in candidates)
        note = why_not
        if note is None and scored < len(candidates):
            note = (
                f"{len(candidates) - scored} of {len(candidates)} candidates keep their places: they are not "
                "analysed (ragserve docs warm)."
            )
        return cls(by=name, scored=scored, candidates=candidates, note=note)


RERANKING = "What the reranker did; null without one."
SEARCHED_FOR = (
    "What was searched for, if there are earlier turns or typing errors were corrected; null otherwise, and "
    "without a search."
)
NAMESPACE = "Namespace that was asked; of several their joint name, such as `a+b`."
INDEX_VERSIONS = "Likewise by namespace, for a search of several; null otherwise."
_INDEX_VERSION = (
    "Version of the namespace that was searched; null for documents given in the request, and where several "
    "were searched."
)
_RETRIEVAL = "Search that found the passages; null for documents given in the request."


class SearchResults(Result):
    """SSE `search_results`: the passages found, before the first token."""

    namespace: str = Field(description=NAMESPACE)
    retrieval: Retrieval | None = Field(description=_RETRIEVAL)
    index_version: int | None = Field(description=_INDEX_VERSION)
    index_versions: dict[str, int] | None = Field(default=None, description=INDEX_VERSIONS)
    searched_for: SearchedFor | None = Field(default=None, description=SEARCHED_FOR)
    reranking: Reranking | None = Field(default=None, description=RERANKING)
    results: list[RetrievedPassage] = Field(
        description="Best first, with strategy `passages` those that it keeps before the others; of these, "
        "the first `documents_kept` are in the prompt."
    )
    documents_kept: int
    evidence: AnswerEvidence | None = Field(default=None, description=EVIDENCE)
    session: str | None = Field(default=None, description="The session's id; null without one.")
    timings: RetrievalTimings
    request_id: str


class Answer(Result):
    """The answer with its sources and the accounting of its computation."""

    answer: str = Field(description="The model's answer; markers `[n]` refer to passages by `index`.")
    citations: list[Citation] = Field(description="Passages that the answer rests on; without any, none.")
    sentences: list[AnswerSentence] = Field(
        default_factory=list, description="The answer's sentences, each with its passages."
    )
    evidence: AnswerEvidence | None = Field(default=None, description=EVIDENCE)
    usage: Usage
    context: ContextUse
    timings: Timings
    session: SessionUse | None = Field(default=None, description="The session; null without one.")
    decode: DecodeUse | None = Field(default=None, description="Pages read; null without sparse decoding.")
    prefill: PrefillUse | None = Field(
        default=None, description="Blocks computed; null where the prefill was dense."
    )
    retrieval: Retrieval | None = Field(default=None, description=_RETRIEVAL)
    searched_for: SearchedFor | None = Field(default=None, description=SEARCHED_FOR)
    reranking: Reranking | None = Field(default=None, description=RERANKING)
    index_version: int | None = Field(description=_INDEX_VERSION)
    index_versions: dict[str, int] | None = Field(default=None, description=INDEX_VERSIONS)
    namespace: str = Field(description=NAMESPACE)
    finish_reason: str = Field(description="`stop`: the model ended; `length`: max_new_tokens reached.")
    request_id: str
