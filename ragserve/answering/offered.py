"""What an engine offers and the gate has verified, beside what a request asks for."""

from __future__ import annotations

from ragserve.answering.auto import AUTO
from ragserve.answering.laid_out import own_options
from ragserve.answering.query import Query
from ragserve.best_passages import PASSAGES
from ragserve.engine.base import EngineInfo, GenerateRequest
from ragserve.errors import InvalidRequest
from ragserve.profiles.gate import Gate
from ragserve.strategy_spec import FORCE, StrategySpec
from sglang_ext.wire.joint_names import is_joint, names_of
from sglang_ext.wire.protocol import EXACT_STRATEGIES


def check_offered(request: GenerateRequest, info: EngineInfo) -> None:
    """Raise InvalidRequest where the engine lacks the strategy or the sparse attention that is asked for, and
    for what does not go together."""
    more = ", without decode_heads_pool='own'"
    if request.decode and not info.sparse_decode:
        raise InvalidRequest(
            "This engine has no sparse decoding.",
            hint=f"Start the server with --sparse-attention on{more}, or omit decode.",
            param="decode",
        )
    if request.prefill and not info.sparse_prefill:
        raise InvalidRequest(
            "This engine has no sparse prefill.",
            hint=f"Start the server with 16-bit KV and --sparse-attention on{more}, or omit prefill.",
            param="prefill",
        )
    if request.asks_sparse and request.strategy not in EXACT_STRATEGIES:
        raise InvalidRequest(
            f"Sparse prefill is for exact strategies, and this request's is {request.strategy!r}.",
            hint="Name strategy prefix or full, or omit prefill.",
            param="prefill",
        )
    if request.strategy == AUTO:
        if own_options(request):
            raise InvalidRequest("Strategy auto takes no options: it chooses them.", param="strategy_options")
        return
    if request.strategy not in info.strategies:
        why = f" {info.only_exact[0].upper()}{info.only_exact[1:]}." if info.only_exact else ""
        raise InvalidRequest(
            f"This engine has no strategy {request.strategy!r}.{why}",
            hint=f"One of: {', '.join((*info.strategies, PASSAGES))}.",
            param="strategy",
        )


def check_verified(query: Query, request: GenerateRequest, gate: Gate | None) -> None:
    """Raise InvalidRequest where a query's request names a composed strategy that is not verified in all of
    its namespaces by their usual search, unless it is forced. Without a gate everything may answer."""
    if request.strategy in (AUTO, *EXACT_STRATEGIES) or gate is None:
        return
    force = request.options.get(FORCE, False)
    if not isinstance(force, bool):
        raise InvalidRequest(f"{FORCE} must be true or false.", param="strategy_options")
    if not force:
        if query.usual is not None and not is_joint(request.namespace):  # each of several has its own
            gate = gate.searched_by(query.usual.retriever)
        for name in names_of(request.namespace):
            gate.check(StrategySpec(request.strategy, own_options(request)).label, name)
