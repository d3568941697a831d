"""Control operations: what the product asks of a scheduler process. Run on the scheduler's thread of every
rank.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_ext.analysis.texts import digest_of
from sglang_ext.diagnostics.compilations import compilations
from sglang_ext.stages import stages
from sglang_ext.state import current
from sglang_ext.wire.protocol import PlanError, prefix_key

if TYPE_CHECKING:
    from sglang_ext.process.runtime import ContextRuntime

log = logging.getLogger(__name__)

Answer = dict[str, Any]
# of a document on several ranks the first of these counts
_LOWEST = ("absent", "writing", "remote", "host", "disk")
_CONFIRM_S = 20.0  # for which a deletion waits for the shared store
_LOOK_S = 2.0  # for which `where` waits for what the shared store has


def answer(runtime: ContextRuntime, body: dict[str, Any]) -> Answer:
    """Return the fields of SGLang's reply to ``{"op": ..., ...}``. An error is part of the answer; only
    `RanksDivided` is raised.

    An operation that waits for the disk answers ``{"pending": token}`` at once, because generation would wait
    with it. The caller asks again with that token, until the answer has none. Times that end such waits are
    by ``now`` of the body: the first rank's monotonic clock, whatever host a rank is on.
    """
    if runtime is None:
        return _failed("this engine's cache is not ragserve's: start it with --radix-cache-backend ragserve")
    operation = _operations.get(str(body.get("op")))
    if operation is None:
        return _failed(f"no operation {body.get('op')!r}: one of {', '.join(sorted(_operations))}")
    found: Answer = {}
    error = ""
    body = {**body, "now": runtime.ranks.first(time.monotonic())}
    try:
        if operation is not _fault:
            stages.reach("control")
        found = operation(runtime, body)
    except stages.RanksDivided:
        raise
    except Exception as raised:
        log.exception("control operation %r failed", body.get("op"))
        error = f"{type(raised).__name__}: {raised}"
    ranks = runtime.ranks.gather((found, error))  # only the first rank's reply reaches the product
    failed = [f"rank {rank}: {text}" if rank else text for rank, (_, text) in enumerate(ranks) if text]
    if failed:
        return _failed(failed[0])
    pending = [theirs for theirs, _ in ranks if "pending" in theirs]
    if pending:
        found = pending[0]
    elif len(ranks) > 1:
        found = _over_ranks("", [theirs for theirs, _ in ranks])
    return {"success": True, "response": [found], "error": ""}


def _over_ranks(
    name: str, values: list[Any], *, add: bool = False, store: bool = False, offloaded: bool = False
) -> Any:
    """Put the ranks' figures of one name together, ``store``: of the store that engines share, ``offloaded``:
    of offloaded requests, whose pages have as many tokens on every rank.

    Every rank has its heads of every document. So bytes, pages and faults are sums, a document is in a tier
    if all ranks have it there, and the rest, as numbers of documents, is the first rank's. In a shared folder
    every rank counts the bytes of all.
    """
    first = values[0]
    if any(isinstance(value, dict) for value in values):
        names = {key: None for value in values for key in value or ()}  # in order
        inside = name in ("faults", "moved_bytes")
        return {
            key: _over_ranks(
                key,
                [value[key] for value in values if key in (value or ())],
                add=inside,
                store=name == "remote",
                offloaded=name == "offloaded",
            )
            for key in names
        }
    if name == "bad":
        return [f"rank {rank}: {bad}" for rank, own in enumerate(values) for bad in own]
    if name in ("on_device", "on_host"):
        return [all(own) for own in zip(*values, strict=True)]
    if name == "below":
        return [min(own, key=_LOWEST.index) for own in zip(*values, strict=True)]
    if name == "scanned":
        return all(values)
    if name == "away":
        return any(values)
    if store and name in ("bytes", "budget_bytes"):
        return max(values)
    if add or name.endswith("bytes") or name == "dropped_writes" or (name == "pages" and not offloaded):
        return None if first is None else sum(values)
    return first


def _failed(message: str) -> Answer:
    return {"success": False, "response": [], "error": message}


def _info(runtime: ContextRuntime, body: dict[str, Any]) -> Answer:
    from sglang_ext.wire.request_options import STRATEGY_OPTIONS

    sparse, composition = current.attention, runtime.composition
    return {
        "decode": None if sparse is None else sparse.describe(),
        "fingerprint": runtime.fingerprint,
        "page_bits": runtime.tiers.shape.bits,
        "prefix": digest_of(runtime.prefix),
        "prefill_kernels": current.prefill_kernels,
        "recompute_graphs": 0 if composition is None else len(composition.composer.graphs or ()),
        "samkv": runtime.profile.digest,
        "samkv_defaults": dict(runtime.profile.completed({})),
        "strategies": [] if runtime.unsupported else list(STRATEGY_OPTIONS),
        "streaming_pool": None if current.streaming is None else current.streaming.describe(),
        "unsupported": runtime.unsupported,
    }


def _prefix(runtime: ContextRuntime, body: dict[str, Any]) -> Answer:
    """Tokens of a prompt in a namespace's exact prefix cache; asking does not refresh their LRU time."""
    from array import array

    return {"tokens": runtime.tree.peek(array("q", body["ids"]), prefix_key(str(body["namespace"])))}


def _stat(runtime: ContextRuntime, body: dict[str, Any]) -> Answer:
    runtime.sweep()
    tokens = runtime.documents.document_tokens()
    below = runtime.tiers.stat()
    sessions = runtime.documents.sessions
    below["host"]["sessions"] = 0 if sessions is None else len(sessions.keys())
    return {
        "device": {
            "documents": len(tokens),
            "tokens": sum(tokens.values()),
            "bytes": sum(tokens.values()) * runtime.documents.slot_bytes,
            "budget_bytes": runtime.documents.pool_bytes,
            "locked_tokens": runtime.tree.protected_size(),
        },
        "analyses": {} if runtime.composition is None else runtime.composition.analyses.stat(),
        **below,
        "evictions": {"device": runtime.tree.documents_evicted, **below["evictions"]},
    }


def _slots(runtime: ContextRuntime, body: dict[str, Any]) -> Answer:
    """KV slots held by running requests: now, the most since the last call, and the pool's total."""
    found: Answer = runtime.slots.take()
    return found


def _check_integrity(runtime: ContextRuntime) -> None:
    if (sparse := current.attention) is not None:
        sparse.check_integrity(runtime.tree)
    runtime.check_integrity()


def _verify(runtime: ContextRuntime, body: dict[str, Any]) -> Answer:
    """Read all files on disk, on a thread of their own."""
    number = body.get("pending")
    if number is None:
        _check_integrity(runtime)
    running = runtime.tiers.verification(number)
    if not running.report.done():
        return {"pending": running.number}
    report = running.report.result()
    return {"pages": report.pages, "bad": [f"{bad.namespace}/{bad.key}: {bad.reason}" for bad in report.bad]}


def _remove(runtime: ContextRuntime, body: dict[str, Any]) -> Answer:
    keys, namespace = [str(key) for key in body["keys"]], str(body["namespace"])
    return _deleted(
        runtime, body, keys, namespace, lambda: {"removed": runtime.documents.remove(keys, namespace)}
    )


def _remove_namespace(runtime: ContextRuntime, body: dict[str, Any]) -> Answer:
    namespace = str(body["namespace"])
    return _deleted(
        runtime, body, None, namespace, lambda: {"removed": runtime.documents.remove_namespace(namespace)}
    )


def _deleted(
    runtime: ContextRuntime,
    body: dict[str, Any],
    keys: list[str] | None,
    namespace: str | None,
    remove: Callable[[], Answer],
) -> Answer:
    """Remove documents, and wait until the shared store has deleted them. Where it is away or slow,
    ``unconfirmed`` says how many it is asked to delete until it has; none is read from it meanwhile."""
    waits = body.get("pending") or {"removed": remove(), "until": body["now"] + _CONFIRM_S}
    left, soon = runtime.tiers.unconfirmed(keys, namespace)
    if left and soon and body["now"] < waits["until"]:
        return {"pending": waits}
    return {**waits["removed"], **({"unconfirmed": left} if left else {})}


def _remove_session(runtime: ContextRuntime, body: dict[str, Any]) -> Answer:
    """Drop the KV of a session; its next turn computes it again."""
    runtime.documents.remove_session(str(body["key"]))
    return {}


def _where(runtime: ContextRuntime, body: dict[str, Any]) -> Answer:
    """The tiers that have each of these documents, and their room; asking does not refresh LRU times."""
    keys, namespace = [str(key) for key in body["keys"]], str(body["namespace"])
    cached = runtime.documents.document_tokens() if keys else {}
    below = [runtime.tiers.where(key, namespace) for key in keys]
    until = body.get("pending") or body["now"] + _LOOK_S
    absent = [key for key, (_, lowest) in zip(keys, below, strict=True) if lowest == "absent"]
    looking = [key for key in absent if runtime.tiers.looks_for(key, namespace)]
    if looking and body["now"] < until:
        return {"pending": until}
    return {
        "on_device": [cached.get(key, 0) >= n for key, n in zip(keys, body["tokens"], strict=True)],
        "on_host": [on_host for on_host, _ in below],
        "below": [lowest for _, lowest in below],
        **runtime.tiers.room(),
    }


def _held(runtime: ContextRuntime, body: dict[str, Any]) -> Answer:
    """The documents of all tiers by the first 16 digits of their keys, with about how many tokens they have,
    least recently used first and those in memory last, at most ``most``; how many of them are in memory (host
    or device), and the tokens of different documents that memory and disk have room for: what is computed is
    put on device and host, so the larger has most of what the smaller has. ``scanned``: whether the
    folder has been listed since the start."""
    device = runtime.documents.document_tokens()
    below = runtime.tiers.held()
    memory = {key: below["host"][key] for key in below["host"] if key not in device} | device
    disk = {key: tokens for key, tokens in below["disk"].items() if key not in memory}
    documents = [[key[:16], tokens] for key, tokens in (disk | memory).items()][-int(body["most"]) :]
    return {
        "documents": documents,
        "in_memory": min(len(memory), len(documents)),
        "memory_tokens": max(runtime.tree.token_to_kv_pool_allocator.size, below["host_room"]),
        "disk_tokens": below["disk_room"],
        "scanned": below["scanned"],
    }


def _clear(runtime: ContextRuntime, body: dict[str, Any]) -> Answer:
    runtime.sweep()

    def remove() -> Answer:
        runtime.documents.clear()
        return {}

    return _deleted(runtime, body, None, None, remove)


def _evict(runtime: ContextRuntime, body: dict[str, Any]) -> Answer:
    """Empty the named tiers, of all documents or of those with the given keys, so that the next use comes
    from the tier below; for measurements and tests. From disk only ``keys`` of a ``namespace``, and only what
    the shared store has then."""
    runtime.sweep()
    if "host" in body["tiers"] and (pending := _until_written(runtime, body)):
        return pending
    keys = None if "keys" not in body else [str(key) for key in body["keys"]]
    if "disk" in body["tiers"]:
        waits = runtime.tiers.demote(keys or [], str(body["namespace"]))
        if not runtime.ranks.all_agree(not waits):
            return {"pending": body.get("pending") or body["now"]}
    runtime.documents.evict(tuple(str(tier) for tier in body["tiers"]), keys)
    return {}


def _budget(runtime: ContextRuntime, body: dict[str, Any]) -> Answer:
    """Set budgets, in bytes over all ranks; ``link_bytes``: a second, for loads of offloaded requests, 0 for
    what is measured."""
    given = [name for name in ("host_bytes", "disk_bytes") if name in body]
    runtime.tiers.set_budget(**{name: int(body[name]) // runtime.ranks.world for name in given})
    if "link_bytes" in body and current.attention is not None:
        current.attention.limit_link(int(body["link_bytes"]) / runtime.ranks.world)
    return {}


def _check(runtime: ContextRuntime, body: dict[str, Any]) -> Answer:
    _check_integrity(runtime)
    return {}


def _flush(runtime: ContextRuntime, body: dict[str, Any]) -> Answer:
    runtime.sweep()
    return _until_written(runtime, body)


def _until_written(runtime: ContextRuntime, body: dict[str, Any]) -> Answer:
    """Nothing once all queued documents are on every rank's disk or the time is up, else what to ask again
    with: the end of that time.
    """
    until = body.get("pending") or body["now"] + float(body.get("timeout_s", 30))
    written = runtime.tiers.flush(0) or body["now"] >= until
    return {} if runtime.ranks.all_agree(written) else {"pending": until}


def _probe(runtime: ContextRuntime, body: dict[str, Any]) -> Answer:
    """Measure a probe of `ragserve calibrate`."""
    if runtime.composition is None:
        raise PlanError(runtime.unsupported)
    found: Answer = runtime.composition.probe(body)
    return found


def _score(runtime: ContextRuntime, body: dict[str, Any]) -> Answer:
    """Score documents for a question by their stored keys, see `document_scores`."""
    if runtime.composition is None:
        raise PlanError(runtime.unsupported)
    found: Answer = runtime.composition.score(body, runtime.fingerprint)
    return found


def _attend(runtime: ContextRuntime, body: dict[str, Any]) -> Answer:
    """What a question attends to in the turns of a session, see `session_attention`."""
    if runtime.composition is None:
        raise PlanError(runtime.unsupported)
    found: Answer = runtime.composition.attend(body)
    return found


def _compiled(runtime: ContextRuntime, body: dict[str, Any]) -> Answer:
    """Kernels that this rank has compiled or loaded: how many, the seconds that took, and what came after the
    first ``since``. ``serving``: log those that come from now on."""
    if "serving" in body:
        compilations.serving = bool(body["serving"])
    found = compilations.since(int(body.get("since", compilations.count)))
    return {"count": compilations.count, "seconds": round(compilations.seconds, 2), "latest": found}


def _launch(runtime: ContextRuntime, body: dict[str, Any]) -> Answer:
    """Launch kernels that the warm-up's requests do not reach, see `rare_launches`."""
    from sglang_ext.process import rare_launches

    recomputes = runtime.composition is not None
    rare_launches.launch(runtime.model_runner, current.attention, recomputes=recomputes)
    return {}


def _segment(runtime: ContextRuntime, body: dict[str, Any]) -> Answer:
    """Prefill the next offloaded request's prompt layer by layer onto the host, though the pool has room.
    Nothing happens where prompts are not prefilled so."""
    requests = None if current.attention is None else current.attention.requests
    segments = None if requests is None else requests.segments
    if segments is not None:
        segments.take_next = True
    return {"segments": segments is not None}


def _fault(runtime: ContextRuntime, body: dict[str, Any]) -> Answer:
    """Make a stage fail once, on one ``rank`` or all of them, where the server allows it; without a stage,
    withdraw what was not reached."""
    if "stage" not in body:
        return {"withdrawn": stages.withdraw()}
    if body.get("rank", runtime.ranks.rank) == runtime.ranks.rank:
        stages.inject(str(body["stage"]), str(body.get("kind", "")))
    return {}


_operations: dict[str, Callable[[Any, dict[str, Any]], Answer]] = {
    "attend": _attend,
    "compiled": _compiled,
    "launch": _launch,
    "segment": _segment,
    "info": _info,
    "prefix": _prefix,
    "probe": _probe,
    "score": _score,
    "slots": _slots,
    "stat": _stat,
    "verify": _verify,
    "where": _where,
    "held": _held,
    "remove": _remove,
    "remove_namespace": _remove_namespace,
    "remove_session": _remove_session,
    "clear": _clear,
    "evict": _evict,
    "fault": _fault,
    "budget": _budget,
    "check": _check,
    "flush": _flush,
}
