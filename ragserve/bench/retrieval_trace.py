"""Retrieval traces: what a retriever returned for real questions, as prompts of a model, and their documents
cached.

A trace is two files: ``NAME.trace.jsonl``, one query per line, ``{"doc_ids": [...]}`` in rank order (with
``"question"`` if it is known), and ``NAME.docs.jsonl`` or ``.jsonl.gz`` beside it, ``{"id": ..., "text": ...,
"title": ...}`` (the title is optional)."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ragserve.engine.base import GenerateRequest, Sampling
from ragserve.engine.document_cache import CachingEngine
from ragserve.engine.local import LocalEngine
from ragserve.errors import InvalidRequest, RagserveError
from ragserve.json_lines import json_lines
from ragserve.verification.engine_run import in_tier
from sglang_ext.wire.protocol import Span

SEED = 0
_FORMAT = "See `ragserve bench --help` for the format."
_GROUP = 16  # documents computed at a time


@dataclass(frozen=True)
class TraceQuery:
    """A prompt's token ids, the spans of its system text and documents, and the documents' names."""

    ids: list[int]
    spans: tuple[Span, ...]
    documents: list[str]

    def request(
        self, rid: str, namespace: str, strategy: str, options: Mapping[str, Any], sampling: Sampling
    ) -> GenerateRequest:
        return GenerateRequest(rid, self.ids, namespace, strategy, sampling, self.spans, options)


@dataclass(frozen=True)
class Trace:
    """Queries drawn from a trace, as prompts; ``unique``: token ids of each document by name."""

    name: str
    queries: list[TraceQuery]
    unique: dict[str, list[int]]

    @property
    def tokens(self) -> int:
        """Tokens of all documents."""
        return sum(map(len, self.unique.values()))


def require(traces: Sequence[Path], bench: str) -> None:
    """Raise InvalidRequest if no trace is given."""
    if not traces:
        raise InvalidRequest(
            f"{bench} needs a trace.",
            hint="Give --data NAME.trace.jsonl, with NAME.docs.jsonl[.gz] beside it.",
        )


def read_trace(path: Path, n_queries: int, model: str, *, passages: int = 0) -> Trace:
    """Draw ``n_queries`` with SEED, keep the order of the trace, and build the model's prompts.

    With ``passages``, a query gets that many different documents: its own, then those of the queries drawn
    after it, the first following the last (fewer if all of them have fewer). Raises InvalidRequest for a bad
    file."""
    from ragserve.answering.prompt import PromptBuilder, PromptDocument

    name = path.name.removesuffix(".trace.jsonl")
    texts = _documents(path, name)
    rows = [row for _, row in json_lines(path, _FORMAT)]
    try:
        drawn = random.Random(SEED).sample(range(len(rows)), min(n_queries, len(rows)))
        chosen = [rows[i] for i in sorted(drawn)]
        lists = [[str(i) for i in row["doc_ids"]] for row in chosen]
        missing = {i for some in lists for i in some} - texts.keys()
    except (KeyError, TypeError) as error:
        raise InvalidRequest(f"{path}: a line without doc_ids ({error!r}).") from None
    if missing or not chosen:
        raise InvalidRequest(
            f"{path}: {len(chosen)} queries, {len(missing)} of their documents are not beside it."
        )
    builder = PromptBuilder.load(model)
    queries, unique = [], {}
    for at, (row, names) in enumerate(zip(chosen, lists, strict=True)):
        wanted = dict.fromkeys(names)
        if passages:
            further = dict.fromkeys(i for some in (*lists[at:], *lists[:at]) for i in some)
            wanted = dict.fromkeys(islice(further, passages))
        documents = [PromptDocument(i, *texts[i]) for i in wanted]
        question = str(row.get("question") or f"What is said about {texts[names[0]][1][:40]}?")
        prompt = builder.build(question, documents, max_prompt_tokens=2**20)
        queries.append(TraceQuery(prompt.input_ids, prompt.spans, [document.key for document in documents]))
        unique.update(
            {s.key: prompt.input_ids[s.start : s.end] for s in prompt.segments if s.kind == "document"}
        )
    return Trace(name, queries, unique)


def _documents(path: Path, name: str) -> dict[str, tuple[str, str]]:
    for candidate in (path.with_name(f"{name}.docs.jsonl"), path.with_name(f"{name}.docs.jsonl.gz")):
        if candidate.exists():
            try:
                return {
                    str(row["id"]): (str(row.get("title", "")), str(row["text"]))
                    for _, row in json_lines(candidate, _FORMAT)
                }
            except KeyError as error:
                raise InvalidRequest(f"{candidate}: a document without {error}.") from None
    raise InvalidRequest(
        f"There are no documents beside {path}.", hint=f"Expected {name}.docs.jsonl or {name}.docs.jsonl.gz."
    )


async def cache_in(engine: LocalEngine, namespace: str, trace: Trace, tier: str) -> None:
    """Compute and analyse the system text and all documents, then evict them from the tiers above ``tier``.

    Raises RagserveError if some are not in ``tier`` afterwards."""
    first = trace.queries[0]
    needed = [first.ids[: first.spans[0].end], *trace.unique.values()]
    await warm_missing(engine, namespace, needed)
    await engine.control("flush")
    await in_tier(engine, tier)
    where = Counter((await engine.where(namespace, needed)).fastest())
    if set(where) != {tier}:
        raise RagserveError(f"after warming, documents are on {dict(where)}, not all on {tier}")


async def warm_missing(engine: CachingEngine, namespace: str, needed: Sequence[list[int]]) -> None:
    """Compute and analyse the documents, token ids, that are in no tier."""
    for at in range(0, len(needed), _GROUP):
        group = needed[at : at + _GROUP]
        found = await engine.where(namespace, group)
        ids: list[int] = []
        spans = []
        for document, below in zip(group, found.below, strict=True):
            if below == "absent":
                spans.append(Span(len(ids), len(ids) + len(document)))
                ids += document
        if spans:
            await engine.warm(GenerateRequest("warm", ids, namespace, spans=tuple(spans), system=False))
