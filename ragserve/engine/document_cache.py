"""Protocol of an engine with a document cache: compute documents ahead of queries, locate and manage them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from ragserve.engine.base import EngineInfo, GenerateRequest
from ragserve.engine.sent_prefixes import SentPrefixes
from sglang_ext.wire.protocol import document_key, prefix_key

_BEGINNING = 2048  # tokens that are asked about first
_PAGE = 256  # no engine has larger pages, of which a prefix cache holds whole ones
Below = Literal["disk", "remote", "host", "writing", "absent"]


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Location of documents, in the requested order, and the room left.

    Attributes:
        on_device: True for documents that are wholly on the device; likewise ``on_host``.
        below: Lowest tier of the engine under the device that has all of a document; `writing` is on its way
            to disk; `remote`: the store that engines share has it, and this engine's disk does not.
        lasting: Lowest tier of this engine.
        budget_bytes: Page bytes that the lasting tier may hold; None without a limit.
        write_room_bytes: Page bytes that the write queue still takes, beside its ``queued_bytes``.
        block: Tokens of a page, of ``page_bytes``.
        faults: Counts by kind since the start."""

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
        """The fastest tier that has all of each document: device, host, disk, remote or absent."""
        return [
            "device" if device else "host" if host or below == "writing" else below
            for device, host, below in zip(self.on_device, self.on_host, self.below, strict=True)
        ]

    def bytes_of(self, n_tokens: int) -> int:
        """Upper bound of a document's share of a tier's budget: its pages and 3 % for their metadata."""
        return -(-n_tokens // self.block) * self.page_bytes * 103 // 100


@runtime_checkable
class CachingEngine(Protocol):
    """An engine with a document cache of its own."""

    @property
    def info(self) -> EngineInfo: ...

    async def ready(self) -> bool:
        """As that of `Engine`: False after the engine has died."""
        ...

    async def warm(self, request: GenerateRequest) -> None:
        """Compute each span of the request alone, into all tiers; and analyse them, if the settings or the
        request's strategy ask for it.

        Spans on the device cost next to nothing."""
        ...

    async def prefix(self, namespace: str, input_ids: Sequence[int]) -> int:
        """Count a prompt's leading tokens in the namespace's exact prefix cache, without refreshing them."""
        ...

    async def where(self, namespace: str, documents: Sequence[Sequence[int]]) -> Whereabouts:
        """Locate documents by their token ids, without changing their order of eviction."""
        ...

    async def control(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """Run an operation of the document cache, as `stat` or `evict`.

        Raises EngineError with its reason."""
        ...


@runtime_checkable
class ManyEngines(Protocol):
    """Several engines with document caches of their own behind one."""

    def answering(
        self, namespace: str, documents: Sequence[Sequence[int]], owners: Sequence[str] = ()
    ) -> CachingEngine:
        """Return the engine that would answer a request of these documents, the system text first.
        ``owners``: as in `GenerateRequest`."""
        ...

    def measured(self) -> CachingEngine:
        """Return an engine that stands for all of them where one is measured."""
        ...


def answering(
    engine: CachingEngine, namespace: str, documents: Sequence[Sequence[int]], owners: Sequence[str] = ()
) -> CachingEngine:
    """Return the engine whose caches count for a request of these documents."""
    return engine.answering(namespace, documents, owners) if isinstance(engine, ManyEngines) else engine


def most_cached(engine: CachingEngine, namespace: str, input_ids: Sequence[int]) -> int:
    """Return an upper bound of `CachingEngine.prefix`, without asking: all tokens, unless the engine
    remembers what it was sent."""
    sent = engine.sent_prefixes if isinstance(engine, ControlledCache) else None
    return len(input_ids) if sent is None else sent.most_cached(prefix_key(namespace), input_ids)


async def fastest_tiers(
    engine: CachingEngine, namespace: str, documents: Sequence[Sequence[int]], owners: Sequence[str] = ()
) -> list[str]:
    """Return `Whereabouts.fastest` of documents, each of its own namespace where there are ``owners``."""
    found: dict[int, str] = {}
    names = owners or [namespace] * len(documents)
    for name in dict.fromkeys(names):
        places = [place for place, owner in enumerate(names) if owner == name]
        tiers = (await engine.where(name, [documents[place] for place in places])).fastest()
        found |= dict(zip(places, tiers, strict=True))
    return [found[place] for place in range(len(documents))]


class ControlledCache(ABC):
    """The calls of `CachingEngine` that are control operations of one engine."""

    sent_prefixes: SentPrefixes | None = None  # where nobody else sends prompts
    _fingerprint = ""  # of the model, as document keys contain it

    @abstractmethod
    async def control(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """See `CachingEngine`; `sglang_ext.process.control` lists the operations."""

    async def where(self, namespace: str, documents: Sequence[Sequence[int]]) -> Whereabouts:
        """See `CachingEngine`."""
        tokens, keys = list(map(len, documents)), self.keys(namespace, documents)
        return Whereabouts.of(await self.control("where", keys=keys, tokens=tokens, namespace=namespace))

    async def prefix(self, namespace: str, input_ids: Sequence[int]) -> int:
        """See `CachingEngine`. Most prompts have little more than the system text cached, and sending the ids
        of a long one takes milliseconds: the beginning is asked about first, and all where it is cached."""
        beginning = list(input_ids[:_BEGINNING])
        found = await self._cached(namespace, beginning)
        if len(beginning) == len(input_ids) or found <= len(beginning) - _PAGE:
            return found
        return await self._cached(namespace, list(input_ids))

    async def _cached(self, namespace: str, input_ids: list[int]) -> int:
        return int((await self.control("prefix", ids=input_ids, namespace=namespace))["tokens"])

    async def forget(self, namespace: str, documents: Sequence[Sequence[int]] | None) -> None:
        """See `Engine`. Drops the namespace's exact prefixes as well: they may contain the documents."""
        if documents is None:
            await self.control("remove_namespace", namespace=namespace)
        elif documents:
            await self.control("remove", keys=self.keys(namespace, documents), namespace=namespace)

    def keys(self, namespace: str, documents: Sequence[Sequence[int]]) -> list[str]:
        """Return the cache keys of documents, given their token ids."""
        return [document_key(namespace, self._fingerprint, ids) for ids in documents]
