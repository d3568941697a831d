"""Retrieval-augmented generation served by SGLang.

    from ragserve import Client

    with Client("http://127.0.0.1:30000") as client:
        print(client.query("Which ocean surrounds Jan Mayen?").answer)

Public names: `Client` and `AsyncClient` (the REST API), `Rag` (retrieval inside SGLang frontend programs) and
the errors of `ragserve.errors`. Each is imported on first use; importing the package alone loads no torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ragserve.version import __version__ as __version__

if TYPE_CHECKING:
    from ragserve.client import AsyncClient, Client
    from ragserve.errors import (
        Conflict,
        DocumentsTooLong,
        EngineError,
        Forbidden,
        InvalidRequest,
        ModelUnavailable,
        NotFound,
        PromptTooLong,
        RagserveError,
        RequestTimeout,
        StorageFull,
        TooLarge,
        TooManyRequests,
        Unauthorized,
        Unavailable,
        UnsupportedDocument,
    )
    from ragserve.programs import Rag

__all__ = [
    "AsyncClient",
    "Client",
    "Conflict",
    "DocumentsTooLong",
    "EngineError",
    "Forbidden",
    "InvalidRequest",
    "ModelUnavailable",
    "NotFound",
    "PromptTooLong",
    "Rag",
    "RagserveError",
    "RequestTimeout",
    "StorageFull",
    "TooLarge",
    "TooManyRequests",
    "Unauthorized",
    "Unavailable",
    "UnsupportedDocument",
]
_MODULES = {  # all others: ragserve.errors
    "AsyncClient": "ragserve.client",
    "Client": "ragserve.client",
    "Rag": "ragserve.programs",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES.get(name, "ragserve.errors")), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
