"""What a warm-up wants of an engine beside generation: computing documents ahead, and asking where they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from ragserve.engine.base import EngineInfo, GenerateRequest

Below = Literal["disk", "host", "writing", "absent"]


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where documents are, in the order asked for, and what room there is.

    ``below``: the lowest tier under the device that has all of a document; ``writing`` is on its way to disk.
    ``lasting`` is the lowest tier there is. Bytes are of pages; ``budget_bytes`` of the lasting tier, None
    without a limit. ``faults`` are counted since the start."""

    on_device: tuple[bool, ...]
    on_host: tuple[bool, ...]
    below: tuple[Below, ...]
    lasting: Literal["disk", "host"]
    budget_bytes: int | None
    write_room_bytes: int
    queued_bytes: int
    block: int
    page_bytes: int
    faults: Mapping[str, int]

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Whereabouts:
        fields = {name: answer[name] for name in cls.__dataclass_fields__}
        return cls(**fields | {name: tuple(answer[name]) for name in ("on_device", "on_host", "below")})

    def fastest(self) -> list[str]:
        """The fastest tier that has all of each document: device, host, disk or absent."""
        both = zip(self.on_device, self.on_host, self.below, strict=True)
        return [
            "device"
            if device
            else "host"
            if host or below == "writing"
            else "disk"
            if below == "disk"
            else "absent"
            for device, host, below in both
        ]

    def bytes_of(self, n_tokens: int) -> int:
        """What a document of so many tokens takes of a tier's budget at most: its pages and 3 % for what is
        stored with them.
        """
        return -(-n_tokens // self.block) * self.page_bytes * 103 // 100


@runtime_checkable
class CachingEngine(Protocol):
    """An engine with a document cache of its own."""

    @property
    def info(self) -> EngineInfo: ...

    async def warm(self, request: GenerateRequest) -> None:
        """Compute every span of the request, alone, into all tiers. Those that are on the device already cost
        next to nothing.
        """
        ...

    async def prefix(self, namespace: str, input_ids: Sequence[int]) -> int:
        """How many of a prompt's first tokens are in the namespace's exact prefix cache. Asking is no use of
        them.
        """
        ...

    async def where(self, namespace: str, documents: Sequence[Sequence[int]]) -> Whereabouts:
        """Where the documents with these token ids are. Asking is no use of them: their order of eviction
        stays.
        """
        ...
