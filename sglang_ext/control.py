"""What the product asks a scheduler process to do with documents, and what it answers. Runs on the scheduler's thread, on every rank."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)

Answer = dict[str, Any]


def answer(runtime: Any, body: dict[str, Any]) -> Answer:
    """The fields of SGLang's reply for ``{"op": ..., ...}``. Never raises: an error is part of the answer."""
    if runtime is None:
        return _failed("this engine's cache is not ragserve's: start it with --radix-cache-backend ragserve")
    operation = _operations.get(str(body.get("op")))
    if operation is None:
        return _failed(f"no operation {body.get('op')!r}: one of {', '.join(sorted(_operations))}")
    try:
        return {"success": True, "response": [operation(runtime, body)], "error": ""}
    except Exception as error:
        log.exception("control operation %r failed", body.get("op"))
        return _failed(f"{type(error).__name__}: {error}")


def _failed(message: str) -> Answer:
    return {"success": False, "response": [], "error": message}


def _info(runtime: Any, body: dict[str, Any]) -> Answer:
    from sglang_ext.context.strategies import names

    return {
        "fingerprint": runtime.fingerprint,
        "strategies": [] if runtime.unsupported else list(names()),
        "unsupported": runtime.unsupported,
    }


def _stat(runtime: Any, body: dict[str, Any]) -> Answer:
    runtime.sweep()
    tokens = runtime.document_tokens()
    return {
        "device": {
            "documents": len(tokens),
            "tokens": sum(tokens.values()),
            "bytes": sum(tokens.values()) * runtime.slot_bytes,
            "budget_bytes": runtime.pool_bytes,
        },
        **runtime.tiers.stat(),
    }


def _verify(runtime: Any, body: dict[str, Any]) -> Answer:
    runtime.check_integrity()
    report = runtime.tiers.verify()
    return {"pages": report.pages, "bad": list(report.bad)}


def _remove(runtime: Any, body: dict[str, Any]) -> Answer:
    return {"removed": runtime.remove([str(key) for key in body["keys"]], str(body["namespace"]))}


def _remove_namespace(runtime: Any, body: dict[str, Any]) -> Answer:
    return {"removed": runtime.remove_namespace(str(body["namespace"]))}


def _clear(runtime: Any, body: dict[str, Any]) -> Answer:
    runtime.clear()
    return {}


def _evict(runtime: Any, body: dict[str, Any]) -> Answer:
    """Drop what is cached in the named tiers, so that the next use comes from the tier below: for measurements and tests."""
    runtime.evict(tuple(str(tier) for tier in body["tiers"]))
    return {}


def _budget(runtime: Any, body: dict[str, Any]) -> Answer:
    runtime.tiers.set_budget(**{name: int(body[name]) for name in ("host_bytes", "disk_bytes") if name in body})
    return {}


def _check(runtime: Any, body: dict[str, Any]) -> Answer:
    runtime.check_integrity()
    return {}


def _flush(runtime: Any, body: dict[str, Any]) -> Answer:
    runtime.tiers.flush(float(body.get("timeout_s", 30)))
    return {}


_operations: dict[str, Callable[[Any, dict[str, Any]], Answer]] = {
    "info": _info,
    "stat": _stat,
    "verify": _verify,
    "remove": _remove,
    "remove_namespace": _remove_namespace,
    "clear": _clear,
    "evict": _evict,
    "budget": _budget,
    "check": _check,
    "flush": _flush,
}
