"""Requests of every kind, sent before an engine is ready, so that no user waits while kernels are compiled.

SGLang's own warm-up leaves out sampling and prompts whose beginning is cached, and knows nothing of documents
and sparse steps. Kernels are compiled at their first launch, for seconds each, and libraries load theirs
then. Compiled ones are kept in folders (`ragserve.engine.server_args`) that the next start reads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Protocol

from ragserve.engine.base import EngineInfo, GenerateChunk, GenerateRequest, Sampling
from ragserve.errors import RagserveError
from sglang_ext.wire.own_names import own_name
from sglang_ext.wire.protocol import EXACT_STRATEGIES, SessionPart, Span, session_key

NAMESPACE = own_name("warm-up")
STRATEGIES: tuple[tuple[str, dict[str, Any]], ...] = (  # each has passes that the others have not
    ("concat", {}),
    ("concat", {"keep": 0.3}),
    ("concat", {"recompute": "all"}),
    ("concat", {"recompute": "sentences", "share": 0.2}),
    ("concat", {"recompute": "anchors", "share": 0.2}),
    ("epic", {"first": 16}),
    ("random", {"share": 0.2}),
    ("cacheblend", {"share": 0.3}),
    ("samkv", {}),
    ("samkv", {"keep": 0.3, "recompute": "sentences", "share": 0.5}),
    ("samkv", {"keep": 0.5, "update": "fusion", "selection": "layers"}),
)
_ON_DEVICE = {"dense_below": 0, "offloaded": False, "lag": 0}  # whatever the server's own options are
DECODE: tuple[dict[str, Any], ...] = (
    {"mode": "hierarchical", "budget": 256, "reuse": 4, "scores": "bound"} | _ON_DEVICE,
    {"mode": "progressive", "threshold": 0.9} | _ON_DEVICE,
)
EXACT = DECODE[0] | {"scores": "exact"}
OFFLOADED: tuple[dict[str, Any], ...] = tuple(each | {"offloaded": True} for each in DECODE)
PREFILL: tuple[dict[str, Any], ...] = tuple(
    {"mode": mode, "dense_below": 0} for mode in ("vertical_slash", "block_sparse")
)
_SYSTEM, _DOCUMENTS, _QUESTION = 48, (400, 272, 131), 24  # tokens
_LONG_ANSWER = Sampling(40, ignore_eos=True)  # an offloaded request moves after a few steps
_LONG = (2000, 1000)  # tokens of documents; more than a recompute graph has rows
_FLUSH_S = 30.0
_FIRST_ID, _IDS = 3, 251  # of the tokens: every vocabulary has them
log = logging.getLogger(__name__)


class WarmedEngine(Protocol):
    """What the warm-up asks of `LocalEngine`."""

    def generate(self, request: GenerateRequest) -> Any:
        """See `Engine`."""

    async def warm(self, request: GenerateRequest) -> None:
        """See `CachingEngine`."""

    async def control(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """See `CachingEngine`."""


async def warm_up(engine: WarmedEngine, info: EngineInfo) -> list[str]:
    """Ask one request of every kind that ``info`` offers, and forget them. Returns the kinds that failed,
    which are logged: users of them get the error.

    On a CPU nothing is compiled, so nothing is asked.
    """
    room = 2 * (_SYSTEM + sum(_LONG) + _QUESTION)  # documents beside a request
    if info.device == "cpu" or info.max_prompt_tokens < room:
        return []
    failed = []
    for kind, ask in _kinds(engine, info):
        try:
            await ask()
        except RagserveError as error:
            failed.append(kind)
            log.warning("the warm-up could not ask a request of kind %s: %s", kind, error)
    await engine.control("remove_namespace", namespace=NAMESPACE)
    await engine.control("compiled", serving=True)
    return failed


def _kinds(engine: WarmedEngine, info: EngineInfo) -> Iterator[tuple[str, Callable[[], Awaitable[Any]]]]:
    """Names of kinds and what asks them, in an order in which each finds what it needs in the cache."""
    composed = [each for each in STRATEGIES if each[0] in info.strategies]
    for kind, request in _exact(info):
        yield kind, partial(_read, engine, request)
    if info.offloaded_tokens:
        yield "prompt by layers", partial(_by_layers, engine)
    yield "turns", partial(_in_turn, engine, _turns("prefix", {}))
    yield "rare launches", partial(engine.control, "launch")
    if not composed:
        return
    yield "long documents", partial(engine.warm, _request(0, "concat", _LONG))
    everything = replace(_request(0, "concat", _LONG), options={"recompute": "all"})
    yield "long recomputation", partial(_read, engine, everything)
    yield "documents", partial(engine.warm, _request(0, "concat"))  # the last that a small host tier gets
    for tier in ("device", "host"):
        if tier == "host":
            yield "eviction", partial(_to_host, engine)
        for number, (strategy, options) in enumerate(composed):
            request = replace(_request(number, strategy), options=options)
            yield f"{strategy} {options} from {tier}", partial(_read, engine, request)
    if info.offloaded_tokens:
        for decode in OFFLOADED:
            offloaded = replace(_request(21, composed[0][0]), decode=decode, sampling=_LONG_ANSWER)
            yield f"composed on the host, {decode['mode']}", partial(_read, engine, offloaded)
    for strategy, options in composed:
        if options.get("recompute") == "sentences":
            yield f"turns, {strategy} {options}", partial(_in_turn, engine, _turns(strategy, options))
            break
    yield "attention to turns", partial(_attend, engine)
    together = [_request(20, name) for name in (*EXACT_STRATEGIES, composed[0][0])]
    yield "several at once", partial(_together, engine, together)
    ids, spans = together[0].input_ids, together[-1].spans
    yield (
        "score",
        partial(
            engine.control,
            "score",
            namespace=NAMESPACE,
            system=ids[: spans[0].end],
            question=ids[spans[-1].end :],
            documents=[ids[span.start : span.end] for span in spans[1:]],
        ),
    )


def _exact(info: EngineInfo) -> Iterator[tuple[str, GenerateRequest]]:
    """Requests of plain SGLang and of sparse steps; the second with `prefix` finds the first's documents."""
    yield "full", _request(0, "full", _LONG)
    sampled = Sampling(4, temperature=0.8, top_p=0.9, top_k=40, frequency_penalty=0.1)
    yield "sampled", replace(_request(1, "full"), sampling=sampled)
    yield "prefix", _request(0, "prefix")
    yield "prefix hit", _request(1, "prefix")
    for decode in DECODE if info.sparse_decode else ():
        long = replace(_request(2, "prefix"), decode=decode, sampling=Sampling(8, ignore_eos=True))
        yield f"decode {decode['mode']}", long
    if info.sparse_decode and info.sparse_prefill:  # both need KV of 16 bits
        exact = replace(_request(5, "prefix"), decode=EXACT, sampling=Sampling(8, ignore_eos=True))
        yield "decode exact", exact
    for decode in OFFLOADED if info.offloaded_tokens else ():
        offloaded = replace(_request(4, "full"), decode=decode, sampling=_LONG_ANSWER)
        yield f"decode offloaded {decode['mode']}", offloaded
    for prefill in PREFILL if info.sparse_prefill else ():
        yield f"prefill {prefill['mode']}", replace(_request(3, "prefix"), prefill=prefill)
    if info.sparse_prefill:  # long prompts have a kernel of their own on some GPUs
        yield "long prefill", replace(_request(8, "prefix", _LONG), prefill=PREFILL[-1])


async def _read(engine: WarmedEngine, request: GenerateRequest) -> None:
    chunk: GenerateChunk
    async for chunk in engine.generate(request):
        if chunk.fallback:
            log.debug("%s fell back: %s", request.strategy, chunk.fallback)


async def _together(engine: WarmedEngine, requests: Sequence[GenerateRequest]) -> None:
    await asyncio.gather(*(_read(engine, request) for request in requests))


async def _by_layers(engine: WarmedEngine) -> None:
    """Ask with a prompt that is prefilled layer by layer onto the host, as one larger than the KV pool."""
    if (await engine.control("segment")).get("segments"):
        request = replace(_request(6, "full", _LONG), decode=OFFLOADED[0], sampling=_LONG_ANSWER)
        await _read(engine, request)


async def _in_turn(engine: WarmedEngine, requests: Sequence[GenerateRequest]) -> None:
    for request in requests:
        await _read(engine, request)


async def _attend(engine: WarmedEngine) -> None:
    """Ask what a question attends to in the first turn of the session that `_turns` makes."""
    first, _ = _turns("prefix", {})
    key, end = session_key(NAMESPACE, "prefix"), len(first.input_ids)
    parts = [[0, _SYSTEM, end // 2, [0, 8]], [0, end // 2, end, [0]]]
    question = _question(30)
    await engine.control("attend", key=key, prompts=[first.input_ids], question=question, parts=parts)


async def _to_host(engine: WarmedEngine) -> None:
    """Leave the documents on the host alone. Nothing else is cached yet."""
    await engine.control("flush", timeout_s=_FLUSH_S)
    await engine.control("evict", tiers=["device"])


def _request(number: int, strategy: str, documents: Sequence[int] = _DOCUMENTS) -> GenerateRequest:
    """Documents of these lengths, which are not written to disk, with another question for every ``number``;
    two tokens, so that one is decoded."""
    ends = [*accumulate(documents, initial=_SYSTEM)]
    spans = (
        () if strategy in EXACT_STRATEGIES else (Span(0, _SYSTEM), *(Span(a, b) for a, b in pairwise(ends)))
    )
    ids = [_FIRST_ID + (n * n + 7 * n) % _IDS for n in range(ends[-1])]
    return GenerateRequest(
        "warm-up",
        ids + _question(number),
        NAMESPACE,
        strategy,
        Sampling(max_new_tokens=2),
        spans,
        unregistered=range(len(spans)),
    )


def _question(number: int) -> list[int]:
    return [_FIRST_ID + (13 * n + 31 * number) % _IDS for n in range(_QUESTION)]


def _turns(strategy: str, options: dict[str, Any]) -> tuple[GenerateRequest, GenerateRequest]:
    """Two turns of a session, the second with a document of its own behind the first."""
    key = session_key(NAMESPACE, strategy)
    first = replace(_request(7, strategy), options=options, session=SessionPart(key))
    behind = [_FIRST_ID + (5 * n * n + n) % _IDS for n in range(_DOCUMENTS[1])]
    ids = [*first.input_ids, *_question(8), *behind]  # as if the first question had been the answer
    held = first.spans[-1].end if first.spans else 0
    start = len(ids) - len(behind)
    spans = (Span(0, start), Span(start, len(ids))) if first.spans else ()
    second = replace(first, input_ids=ids + _question(9), spans=spans, session=SessionPart(key, held))
    return first, replace(second, unregistered=range(len(spans)), earlier=lambda: first)
