"""SGLang 0.5.23: a request has a number of prefix tokens, whose slots the cache is asked for. The cache takes
KV at checkpoints, and what it does not keep is freed by SGLang."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

_TREE = "sglang.srt.mem_cache.radix_cache.RadixCache"
_BASE = "sglang.srt.mem_cache.base_prefix_cache.BasePrefixCache"
RELIED_ON: dict[str, tuple[str, ...]] = {
    f"{_TREE}.match_prefix": ("self", "params"),
    f"{_TREE}.checkpoint": ("self", "req", "up_to"),
    f"{_TREE}.insert": ("self", "params"),
    f"{_TREE}.evict": ("self", "params"),
    f"{_TREE}.reset": ("self",),
    f"{_TREE}._delete_leaf": ("self", "node"),
    "sglang.srt.mem_cache.hicache_storage.HiCacheFile._get_suffixed_key": ("self", "key"),
    f"{_TREE}.path_device_indices": ("self", "node"),
    f"{_BASE}.prefix_device_indices": ("self", "req"),
    f"{_BASE}.free_kv_row": ("self", "kv", "ranges"),
    f"{_BASE}.claim_kv_row": ("self", "req"),
    f"{_BASE}.on_release": ("self", "req", "checkpointed"),
    f"{_BASE}.unlock": ("self", "lock"),
}
WEIGHT_ENTRIES = ("begin_weight_update",)
OWN_HOOKS: tuple[
    tuple[str, tuple[str, ...], Callable[..., Any], Literal["before", "after", "around"]], ...
] = ()


def resolve(server_args: Any) -> None:
    """Let SGLang check its ServerArgs and choose what was left open."""
    server_args.resolve_once()


def settings_of(server_args: Any) -> Any:
    """What SGLang has made of its ServerArgs, which themselves stay as they were given."""
    from sglang.srt.arg_groups.model_override_base import resolving_view

    return resolving_view(server_args)


def paged_allocator() -> Any:
    """What makes the KV slot allocator of the CPU platform; None for SGLang's own choice, which needs no
    Triton."""
    return None


def drawn(sampled: Any) -> torch.Tensor:
    """Tokens [rows] of what `Sampler._sample_from_probs` returns."""
    return sampled[0]


def row_of(req: Any) -> Any:
    """The request's row of the request table; None while it has none."""
    return req.kv.req_pool_idx


def extend_span(req: Any) -> tuple[int, int]:
    """First token that the step extends, and the one behind the last."""
    return req.prefix_len, req.extend_end


def extend_end(req: Any) -> int:
    """The token behind the last that the step extends."""
    return int(req.extend_end)


def prefix_tokens(req: Any) -> int:
    """Tokens of the request whose KV is there before it extends."""
    return int(req.prefix_len)


def protected_tokens(req: Any) -> int:
    """Leading tokens whose slots the tree owns."""
    return int(req.kv.cache_protected_len)


def protect(req: Any, tokens: int) -> None:
    """Let the tree, or nobody, own the slots of so many leading tokens."""
    req.kv.cache_protected_len = tokens


def show_prefix(req: Any, slots: torch.Tensor, node: Any = None, protected: int = 0) -> None:
    """Let SGLang take these slots, int64, for the request's prefix until it is admitted. ``node``: of the
    tree, which owns ``protected`` of them; SGLang locks it."""
    req.prefix_len, req.ragserve_prefix = len(slots), slots
    if node is not None:
        req.last_node, req.kv.cache_protected_len = node, protected


def prefix_shown(req: Any) -> Any:
    """What `restore_prefix` takes back."""
    return req.prefix_len, req.last_node, req.kv.cache_protected_len


def restore_prefix(req: Any, shown: Any) -> None:
    """Undo `show_prefix`."""
    req.prefix_len, req.last_node, req.kv.cache_protected_len = shown
    req.ragserve_prefix = None


def reserve_tokens(adder: Any, tokens: int) -> None:
    """Let SGLang's `PrefillAdder` count on so many slots less, in the rest of its step."""
    adder.memory_budget.total_offset += tokens


def tp_group(runner: Any) -> Any:
    """SGLang's group of tensor-parallel ranks."""
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().tp_group


LAYER_ARGUMENTS: tuple[tuple[str, ...], ...] = (
    ("positions", "hidden_states", "forward_batch", "residual"),
    ("positions", "hidden_states", "forward_batch"),
)
"""What decoder layers may take that `run_layer` runs. The first form is an older one, of few models."""


@cache
def _takes_residual(layer: Any) -> bool:
    return "residual" in inspect.signature(layer.forward).parameters


def run_layer(layer: Any, positions: Any, hidden: Any, batch: Any, residual: Any) -> tuple[Any, Any]:
    """Run a decoder layer. Return the hidden states, and what to give the next layer as ``residual``; None to
    give the first."""
    if _takes_residual(layer.__class__):
        return layer(positions, hidden, batch, residual)
    from sglang.srt.layers.layer_boundary.residual.batch import start

    if residual is None:
        start(batch)
    else:
        batch.residual_stream = residual
    return layer(positions, hidden, batch), batch.residual_stream


class _Served:
    """What SGLang uses of a `uvicorn.Server`."""

    def __init__(self, run: Callable[[], None], stop: Callable[[], None]) -> None:
        self.run = run
        self._stop = stop

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "should_exit":
            self._stop()
        else:
            super().__setattr__(name, value)


@contextmanager
def served_by(http_server: Any, run: Callable[..., None], stop: Callable[[], None]) -> Iterator[None]:
    """In the block, SGLang's main process calls ``run(app, **options)``, with the options of
    `uvicorn.Config`, in place of serving its app, and ``stop()`` to end that."""
    original, freeze = http_server.uvicorn, http_server._freeze_gc_after_server_warmup
    http_server.uvicorn = SimpleNamespace(
        run=run,
        Config=lambda app, **options: partial(run, app, **options),
        Server=lambda go: _Served(go, stop),
    )
    # it would ask the server's own route, which waits for the warm-up and may want a key
    http_server._freeze_gc_after_server_warmup = lambda server_args: None
    try:
        yield
    finally:
        http_server.uvicorn, http_server._freeze_gc_after_server_warmup = original, freeze


def leave_tree(tree: Any, req: Any) -> None:
    """Unlock the request's node, so that the tree may evict the request's cached prefix."""
    tree.unlock(req.lock)
    req.lock, req.last_node = None, tree.root_node


def matched_slots(tree: Any, match: Any) -> torch.Tensor:
    """Slots of a match, int64."""
    return tree.path_device_indices(match.last_device_node)


def keep_exact(cache: Any, exact_tokens: Callable[[Any, int], int]) -> None:
    """Let a cache of SGLang's own take no answer that has sparse decode steps. Its prompt is there already.

    ``exact_tokens``: as `TreeObserver.exact_tokens`."""
    original = cache.checkpoint

    def checkpoint(req: Any, *, up_to: int, **kwargs: Any) -> Any:
        if not req.finished() or exact_tokens(req, up_to) == up_to:
            return original(req, up_to=up_to, **kwargs)
        return None

    cache.checkpoint = checkpoint
