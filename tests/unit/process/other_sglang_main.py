"""Checks what the document cache does with KV on the other SGLang that is served, in a process of its own.

Prints "fits", or fails."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

from sglang_ext.cpu.torchvision import prepare

prepare()

import torch  # noqa: E402
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402

from sglang_ext.documents.radix import DocumentRadixCache  # noqa: E402

PAGE, SLOTS = 4, 64


class Allocator:
    """Whole pages of slots; knows which are taken."""

    device, page_size = "cpu", PAGE

    def __init__(self) -> None:
        self.taken: set[int] = set()

    def take(self, slots: range) -> torch.Tensor:
        self.taken |= set(slots)
        return torch.tensor(slots)

    def free(self, slots: torch.Tensor) -> None:
        gone = {int(slot) // PAGE * PAGE + i for slot in slots for i in range(PAGE)}
        assert gone <= self.taken, "nothing is freed twice"
        self.taken -= gone

    def free_segment(self, slots: torch.Tensor, *, start_pos: int) -> None:
        assert start_pos % PAGE == 0
        self.free(slots)

    def free_segments(self, segments: list[tuple[torch.Tensor, int]]) -> None:
        for slots, start in segments:
            self.free_segment(slots, start_pos=start)


class Observer:
    """Gives blocks back when a request is released, as offloaded ones do."""

    def __init__(self) -> None:
        self.protected: int | None = None
        self.told: list[str] = []

    def is_composed(self, req: Any) -> bool:
        return False

    def exact_tokens(self, req: Any, tokens: int) -> int:
        return tokens

    def before_release(self, req: Any, tokens: int) -> None:
        self.told.append("release")
        if self.protected is not None:
            req.kv.cache_protected_len = self.protected

    def on_document(self, req: Any, slots: torch.Tensor) -> None:
        self.told.append(f"{len(slots)} slots")

    def on_finished(self) -> None:
        self.told.append("finished")

    def on_cached(self, req: Any, node: Any) -> None: ...
    def on_evicted(self, node: Any) -> None: ...


def main() -> None:
    from sglang.srt.managers.schedule_batch import ReqKvInfo

    allocator, observer = Allocator(), Observer()
    rows: Any = SimpleNamespace(req_to_token=torch.zeros(2, SLOTS, dtype=torch.int32))
    rows.write = lambda at, slots: rows.req_to_token.__setitem__(at, slots.to(torch.int32))
    tree = DocumentRadixCache(
        CacheInitParams(
            disable=False, req_to_token_pool=rows, token_to_kv_pool_allocator=allocator, page_size=PAGE
        )
    )
    tree.observer = observer
    ids = array("q", range(10))

    def request(first: int) -> Any:
        """A request of ten tokens whose slots begin at ``first``; two more of its last page are its own."""
        rows.req_to_token[0, :12] = allocator.take(range(first, first + 12)).to(torch.int32)
        kv = ReqKvInfo(req_pool_idx=0, kv_committed_len=10, kv_allocated_len=10)
        return SimpleNamespace(
            kv=kv,
            extra_key=None,
            cache_salt=None,
            priority=0,
            origin_input_ids=ids,
            lock=None,
            full_untruncated_fill_ids=ids,
            finished=lambda: True,
            last_node=tree.root_node,
        )

    req = request(4)
    assert tree.claim_kv_row(req) is False
    tree.checkpoint(req, up_to=10)
    tree.free_kv_row(req.kv, [(req.kv.cache_protected_len, 10)])
    tree.unlock(req.lock)
    tree.on_release(req, checkpointed=True)
    assert observer.told == ["release", "10 slots", "finished"]
    assert allocator.taken == set(range(4, 12)), "two whole pages are the tree's"
    assert [tree.peek(ids[:n], None) for n in (3, 4, 10)] == [0, 4, 8], "a part of a page is nowhere"

    observer.told, observer.protected = [], 8
    retracted = request(16)
    retracted.kv.cache_protected_len = 0  # blocks that are given back counted as its own
    tree.claim_kv_row(retracted)
    tree.free_kv_row(retracted.kv, [(0, 10)])
    tree.on_release(retracted, checkpointed=False)
    assert observer.told == ["release", "finished"]
    assert allocator.taken == {*range(4, 12), *range(16, 24)}, "what it owns after it has been told"
    print("fits")


if __name__ == "__main__":
    main()
