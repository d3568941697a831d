"""`/info` and `/ready`, and `/metrics` if SGLang does not serve it."""

from __future__ import annotations

import asyncio
import platform
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol, runtime_checkable

from fastapi import APIRouter, Request, Response
from starlette.responses import JSONResponse

from ragserve import __version__
from ragserve.api import examples
from ragserve.api.access import Caller
from ragserve.api.openapi import documented, failures
from ragserve.api.schemas import MAX_DOCUMENTS
from ragserve.api.search_fields import MAX_K
from ragserve.api.services import RequestId, Services, Svc
from ragserve.api.views import Info, Ready
from ragserve.best_passages import PASSAGES
from ragserve.cache.warm import warming
from ragserve.engine.document_cache import ControlledCache
from ragserve.errors import EngineError, Unavailable
from ragserve.metrics import exposition
from ragserve.retrieval.embedder import known_dim
from ragserve.retrieval.remote_reranker import public_name


@runtime_checkable
class Workers(Protocol):
    """An engine with workers behind it."""

    def workers(self) -> list[dict[str, Any]]: ...


router = APIRouter(tags=["system"])
metrics_router = APIRouter(tags=["system"])
_ENGINE_ANSWERS_WITHIN_S = 5.0


@router.get(
    "/info",
    summary="Show versions, model and limits",
    responses=documented(
        examples.INFO, (503,), description="Versions, model, engine, embedder, defaults, limits and index"
    ),
)
async def info(svc: Svc, caller: Caller) -> Info:
    """Show all that a client needs to know and a bug report should contain."""
    settings, engine = svc.settings, svc.engine.info
    namespaces = caller.visible(await asyncio.to_thread(svc.store.namespaces))
    warm_ups = await asyncio.to_thread(lambda: warming(svc.seen_jobs(caller).unfinished()))
    versions = {"ragserve": __version__, "sglang": engine.version, "python": platform.python_version()}
    for package in ("torch", "faiss-cpu", "sentence-transformers"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return Info(
        versions=versions,
        model=engine.model,
        tokenizer=engine.tokenizer,
        system_prompt=settings.system_prompt,
        engine=asdict(engine) | _workers(svc, caller) | await _held(svc),
        embedder={"name": svc.embedder.name, "dim": known_dim(svc.embedder)},
        strategies=[*engine.strategies, PASSAGES],
        defaults={
            "k": settings.top_k,
            "retrieval": settings.retrieval,
            "follow_ups": settings.follow_ups,
            "spelling": settings.spelling,
            "rerank": public_name(settings.rerank),
            "rerank_candidates": settings.rerank_candidates,
            "neighbours": settings.neighbours,
            "context_tokens": settings.context_tokens,
            "min_score": settings.min_score,
            "dedupe": settings.dedupe,
            "not_found": settings.not_found,
            "strategy": settings.strategy,
            "max_new_tokens": settings.max_new_tokens,
            "temperature": 0.0,
        },
        limits={
            "max_query_chars": settings.max_query_chars,
            "max_history_messages": settings.max_history_messages,
            "max_body_bytes": settings.max_body_bytes,
            "max_upload_bytes": settings.max_upload_bytes,
            "max_upload_files": settings.max_upload_files,
            "max_concurrent_queries": settings.max_concurrent_queries,
            "max_k": min(MAX_K, caller.who.limits.max_k or MAX_K),
            "max_documents": MAX_DOCUMENTS,
            "query_log_bytes": settings.query_log_bytes,
            "feedback_bytes": settings.feedback_bytes,
            "max_context_tokens": engine.max_prompt_tokens,
        },
        index={
            "default_type": settings.index_type,
            "device": settings.index_device,
            "chunk_tokens": settings.chunk_tokens,
            "namespaces": len(namespaces),
            "documents": sum(one.n_documents for one in namespaces),
            "chunks": sum(one.n_chunks for one in namespaces),
            "cut_for_another_model": [one.name for one in namespaces if one.name in svc.foreign],
        },
        warming=warm_ups,
        verification=await asyncio.to_thread(
            svc.verification.info,
            # its questions are about all documents
            lambda name: caller.who.covers(name) and not svc.store.hides(name),
        ),
    )


async def _held(svc: Services) -> dict[str, dict[str, Any]]:
    """What requests hold whose KV is on the host, and what bounds their number; or where streaming heads have
    a pool of their own, what requests hold in the two."""
    offloaded, own = svc.settings.kv_offload_bytes, svc.settings.decode_heads_pool == "own"
    if not (offloaded or own) or not isinstance(svc.engine, ControlledCache):
        return {}
    try:
        async with asyncio.timeout(_ENGINE_ANSWERS_WITHIN_S):
            info = await svc.engine.control("info")
    except (TimeoutError, EngineError):
        return {}
    return {"streaming_pool": info["streaming_pool"]} if own else {"offloaded": info["decode"]["offloaded"]}


def _workers(svc: Services, caller: Caller) -> dict[str, list[dict[str, Any]]]:
    """The workers behind this server, for those who operate it."""
    if not isinstance(svc.engine, Workers) or not caller.who.is_admin:
        return {}
    return {"workers": svc.engine.workers()}


@router.get(
    "/ready",
    summary="Check readiness",
    response_model=Ready,
    responses=documented(examples.READY, (503,), description="Ready"),
)
async def ready(request: Request, request_id: RequestId) -> Response:
    """Answer 503 until queries can be answered; `missing` lists the reasons, beside the usual error body."""
    missing = await _missing(getattr(request.app.state, "services", None))
    if not missing:
        return JSONResponse(Ready(ready=True, missing=[]).model_dump())
    error = Unavailable(
        f"Not ready: {'; '.join(missing)}.",
        hint="Retry in a moment; see the server's log.",
        code="not_ready",
    )
    body = {**Ready(ready=False, missing=missing).model_dump(), **error.body(request_id)}
    return JSONResponse(body, error.status, {"Retry-After": "1"})


async def _missing(svc: Services | None) -> list[str]:
    if svc is None:
        return ["the server is starting or stopping"]
    try:
        async with asyncio.timeout(_ENGINE_ANSWERS_WITHIN_S):
            answers = await svc.engine.ready()
    except TimeoutError:
        answers = False
    if answers:
        return []
    if isinstance(svc.engine, Workers):
        states = [str(worker["state"]) for worker in svc.engine.workers()]
        return [f"no worker serves requests ({', '.join(states)})"]
    return ["the engine does not serve requests"]


@metrics_router.get(
    "/metrics",
    summary="Prometheus metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"example": examples.METRICS}}}, **failures()},
)
async def metrics() -> Response:
    """Metrics `ragserve_*`, and SGLang's where it runs in this server; elsewhere it serves its own."""
    body, content_type = await asyncio.to_thread(exposition)
    return Response(body, media_type=content_type)
