"""What composed contexts ask of offloaded decoding; `attention.offload.requests` implements it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from sglang_ext.kv_offload.documents.context_pages import ContextPages
from sglang_ext.kv_offload.documents.host_documents import HostDocuments
from sglang_ext.kv_offload.host_target import HostTarget


class ContextOffload(Protocol):
    """Admits composed requests whose context goes to host pages. Scheduler thread only."""

    def reserve(
        self,
        req: Any,
        tokens: int,
        *,
        full: bool,
        find: Callable[[HostDocuments, int], ContextPages | None],
    ) -> bool:
        """Take host pages for a context of ``tokens`` tokens. Return False if it is composed on the device.

        ``full``: the device has no room for it, which requests with ``offloaded`` "auto" wait for. ``find``
        finds it in its documents' host pages, given the tokens of a page."""

    def may_find_room(self, req: Any, tokens: int) -> bool:
        """Return whether requests in no batch hold host pages that the context lacks, and will free them."""

    def compose(self, adder: Any, req: Any, add: Callable[[], Any]) -> tuple[Any, HostTarget | None]:
        """Admit a request with pages from `reserve`, which are freed where SGLang declines.

        Return SGLang's result, and where the context is to be written; None where nothing is to be."""


class SparseDecoding(Protocol):
    """The sparse decoding of a scheduler process."""

    @property
    def requests(self) -> ContextOffload | None:
        """Its offloaded requests; None where KV is not offloaded."""
