"""SGLang 0.5.17: a request's prefix is a tensor of slots, and the cache frees what it does not keep."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from sglang_ext.versions.sglang_0_5_17.own_hooks import OWN_HOOKS as OWN_HOOKS

if TYPE_CHECKING:
    import torch

_TREE = "sglang.srt.mem_cache.radix_cache.RadixCache"
RELIED_ON: dict[str, tuple[str, ...]] = {
    f"{_TREE}.match_prefix": ("self", "params"),
    f"{_TREE}.cache_finished_req": ("self", "req", "is_insert", "kv_len_to_handle"),
    f"{_TREE}.cache_unfinished_req": ("self", "req", "chunked"),
    f"{_TREE}.insert": ("self", "params"),
    f"{_TREE}.evict": ("self", "params"),
    f"{_TREE}.reset": ("self",),
    f"{_TREE}._delete_leaf": ("self", "node"),
    "sglang.srt.mem_cache.hicache_storage.HiCacheFile._get_suffixed_key": ("self", "key"),
}
WEIGHT_ENTRIES: tuple[str, ...] = ()


def resolve(server_args: Any) -> None:
    """Let SGLang check its ServerArgs and choose what was left open: they do so when they are made."""


def settings_of(server_args: Any) -> Any:
    """What SGLang has made of its ServerArgs."""
    return server_args


def paged_allocator() -> Any:
    """What makes the KV slot allocator of the CPU platform; None for SGLang's own choice."""
    from sglang_ext.versions.sglang_0_5_17.cpu_allocator import make_allocator

    return make_allocator


def drawn(sampled: Any) -> torch.Tensor:
    """Tokens [rows] of what `Sampler._sample_from_probs` returns."""
    return sampled


def row_of(req: Any) -> Any:
    """The request's row of the request table; None while it has none."""
    return req.req_pool_idx


def extend_span(req: Any) -> tuple[int, int]:
    """First token that the step extends, and the one behind the last."""
    return req.extend_range.start, req.extend_range.end


def extend_end(req: Any) -> int:
    """The token behind the last that the step extends."""
    return int(req.extend_range.end)


def prefix_tokens(req: Any) -> int:
    """Tokens of the request whose KV is there before it extends."""
    return len(req.prefix_indices)


def protected_tokens(req: Any) -> int:
    """Leading tokens whose slots the tree owns."""
    return int(getattr(req, "cache_protected_len", 0))


def protect(req: Any, tokens: int) -> None:
    """Let the tree, or nobody, own the slots of so many leading tokens."""
    req.cache_protected_len = tokens


def show_prefix(req: Any, slots: torch.Tensor, node: Any = None, protected: int = 0) -> None:
    """Let SGLang take these slots, int64, for the request's prefix until it is admitted. ``node``: of the
    tree, which owns ``protected`` of them; SGLang locks it."""
    req.prefix_indices = slots
    if node is not None:
        req.last_node, req.cache_protected_len = node, protected


def prefix_shown(req: Any) -> Any:
    """What `restore_prefix` takes back."""
    return req.prefix_indices, getattr(req, "last_node", None), protected_tokens(req)


def restore_prefix(req: Any, shown: Any) -> None:
    """Undo `show_prefix`."""
    req.prefix_indices, req.last_node, req.cache_protected_len = shown


def reserve_tokens(adder: Any, tokens: int) -> None:
    """Let SGLang's `PrefillAdder` count on so many slots less, in the rest of its step."""
    adder.rem_total_token_offset += tokens


def tp_group(runner: Any) -> Any:
    """SGLang's group of tensor-parallel ranks."""
    return runner.tp_group


LAYER_ARGUMENTS: tuple[tuple[str, ...], ...] = (("positions", "hidden_states", "forward_batch", "residual"),)
"""What decoder layers may take that `run_layer` runs."""


def run_layer(layer: Any, positions: Any, hidden: Any, batch: Any, residual: Any) -> tuple[Any, Any]:
    """Run a decoder layer. Return the hidden states, and what to give the next layer as ``residual``; None to
    give the first."""
    return layer(positions, hidden, batch, residual)


@contextmanager
def served_by(http_server: Any, run: Callable[..., None], stop: Callable[[], None]) -> Iterator[None]:
    """In the block, SGLang's main process calls ``run(app, **options)``, with the options of
    `uvicorn.Config`, in place of serving its app, and ``stop()`` to end that."""
    original = http_server.uvicorn
    http_server.uvicorn = SimpleNamespace(run=run, Config=original.Config, Server=original.Server)
    try:
        yield
    finally:
        http_server.uvicorn = original


def leave_tree(tree: Any, req: Any) -> None:
    """Unlock the request's node, so that the tree may evict the request's cached prefix."""
    if req.last_node is not None:
        tree.dec_lock_ref(req.last_node)
    req.last_node = tree.root_node


def matched_slots(tree: Any, match: Any) -> torch.Tensor:
    """Slots of a match, int64."""
    return match.device_indices


def keep_exact(cache: Any, exact_tokens: Callable[[Any, int], int]) -> None:
    """Let a cache of SGLang's own take no answer that has sparse decode steps. Its prompt is there already.

    ``exact_tokens``: as `TreeObserver.exact_tokens`."""
    finished = cache.cache_finished_req

    def cache_finished_req(req: Any, is_insert: bool = True, *, kv_len_to_handle: int, **kwargs: Any) -> Any:
        exact = exact_tokens(req, kv_len_to_handle) == kv_len_to_handle
        return finished(req, is_insert=is_insert and exact, kv_len_to_handle=kv_len_to_handle, **kwargs)

    cache.cache_finished_req = cache_finished_req
