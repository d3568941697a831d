"""Account that a worker gives of itself: identity, model, and whether it takes requests."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ragserve import __version__
from ragserve.engine.base import EngineInfo
from ragserve.errors import InvalidRequest
from ragserve.files import write_json

_IDENTITY_FILE = "worker.json"
# What must be equal on all workers, with the name that an operator knows it by.
_COMPARED = {
    "version": "SGLang",
    "fingerprint": "weights",
    "dtype": "dtype",
    "samkv": "samkv profile",
    "page_bits": "kv_page_bits",
    "prefix": "kv_prefix",
    "strategies": "strategies",
    "sparse_decode": "sparse decoding",
    "sparse_prefill": "sparse prefill",
    "sparse": "sparse attention",
    "device": "device",
}


@dataclass(frozen=True, slots=True)
class WorkerAbout:
    """A worker at one moment.

    Attributes:
        id: Name of its data folder, the same after a restart.
        boot: Name of its process.
        ragserve: Its version.
        cache_fingerprint: The model's, as keys of documents contain it.
        engine: Model and limits.
        draining: It takes no new requests.
        in_flight: Requests that it is running."""

    id: str
    boot: str
    ragserve: str
    cache_fingerprint: str
    engine: EngineInfo
    draining: bool
    in_flight: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> WorkerAbout:
        """Read what `to_json` has made. Raises KeyError and TypeError for anything else."""
        engine = EngineInfo(**body["engine"] | {"strategies": tuple(body["engine"]["strategies"])})
        return cls(**{name: body[name] for name in cls.__dataclass_fields__} | {"engine": engine})


def differences(about: WorkerAbout, other: WorkerAbout) -> str:
    """Say in what two workers differ that must be equal; empty if they may serve together."""
    found = [
        f"{label} {mine!r} and {theirs!r}"
        for name, label in _COMPARED.items()
        if (mine := getattr(about.engine, name)) != (theirs := getattr(other.engine, name))
    ]
    if about.cache_fingerprint != other.cache_fingerprint:
        found.append(f"KV of model {about.cache_fingerprint!r} and {other.cache_fingerprint!r}")
    return ", ".join(found)


def version_problem(ragserve: str) -> str:
    """Say why a worker of this version of ragserve cannot be used; empty if it can."""
    return "" if ragserve == __version__ else f"it runs ragserve {ragserve}, this server {__version__}"


def identity(data_dir: Path) -> str:
    """Return the worker's name, which is made once for a data folder.

    Raises InvalidRequest for a file that is damaged: under another name the worker would never be told of
    the deletions that servers have noted for it, and would keep that KV."""
    path = data_dir / _IDENTITY_FILE
    try:
        name = json.loads(path.read_text(encoding="utf-8"))["id"]
        if not (isinstance(name, str) and name):
            raise TypeError("id is no name")
    except FileNotFoundError:
        name = uuid.uuid4().hex
        write_json(path, {"id": name}, durable=True)
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(
            f"{path} is damaged ({error!r}): it holds the worker's name.",
            hint="Put the file of a backup in its place. Without one, remove it and all KV on this worker's "
            f"disk (ragserve cache clear --data-dir {data_dir}): it then begins as a new worker.",
        ) from error
    return name
