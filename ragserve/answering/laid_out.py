"""A turn whose prompt is laid out: its request to the engine, and whether there was room."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, replace
from typing import Any

from ragserve.answering.prompt import Prompt
from ragserve.answering.query import Query
from ragserve.answering.results import RetrievedPassage
from ragserve.engine.base import GenerateRequest
from ragserve.errors import DocumentsTooLong
from ragserve.strategy_spec import FORCE
from sglang_ext.wire.joint_names import is_joint


@dataclass(frozen=True, slots=True)
class LaidOutTurn:
    """A prompt, the passages found with their numbers, of which the first ``shown`` are in it, and all the
    passages in it, by number."""

    prompt: Prompt
    found: list[RetrievedPassage]
    shown: int
    passages: list[RetrievedPassage]

    def namespaces(self, query: Query) -> list[str]:
        """The namespace that was asked; of several, those whose passages are in the prompt."""
        asked = query.request.namespace
        if not is_joint(asked):
            return [asked]
        return list(dict.fromkeys(each.namespace for each in self.passages if each.namespace))


_SECRET = secrets.token_bytes(32)  # so that nobody can name a namespace after one of these


def apart(namespace: str, owner: str) -> str:
    """A name under which the engine keeps the KV of what an owner has sent, apart from the namespace's: how
    soon an answer comes would tell whether the namespace has the same text, in documents that are hidden."""
    digest = hashlib.blake2b(f"{namespace}/{owner}".encode(), key=_SECRET, digest_size=16)
    return f"apart-{digest.hexdigest()}"


def laid_out_request(query: Query, request: GenerateRequest, prompt: Prompt) -> GenerateRequest:
    """The request with its prompt."""
    return replace(
        request,
        input_ids=prompt.input_ids,
        sampling=replace(request.sampling, stop=(*request.sampling.stop, *prompt.stop)),
        spans=prompt.spans,
        options=own_options(request),
        owners=prompt.owners(request.namespace),
        unregistered=_unregistered(query, len(prompt.spans)),
    )


def _unregistered(query: Query, spans: int) -> range:
    """Numbers of the spans, the system text first, whose text came with the query."""
    if query.documents is not None:
        return range(spans)
    return range(0 if query.system is None and query.tools is None else 1)


def check_room(query: Query, prompt: Prompt, found: int, *, alone: bool) -> None:
    """Raise DocumentsTooLong where an answer would ignore what the client gave, or rest on nothing.
    ``alone``: there are no other documents than those found."""
    if prompt.documents_kept == found or prompt.cut_to is not None:
        return
    given = query.documents is not None
    if (prompt.documents_kept or not alone) and (not given or query.overflow == "drop"):
        return
    sizes = (
        f"take {prompt.tokens_retrieved:,} tokens, and the context has room for {prompt.room:,}, apart from "
        "the question and the answer"
    )
    if given:
        raise DocumentsTooLong(
            f"The documents {sizes}.",
            hint='Send less, lower max_new_tokens, or let them be shortened: "documents_overflow": "cut".',
            param="documents",
        )
    raise DocumentsTooLong(
        f"None of the {found} retrieved passages fits: they {sizes}.",
        hint="Shorten question and history, lower max_new_tokens, or ingest with a smaller chunk_tokens.",
        param="query",
    )


def own_options(request: GenerateRequest) -> dict[str, Any]:
    """The strategy's options, without the gate's `force`."""
    return {name: value for name, value in request.options.items() if name != FORCE}
