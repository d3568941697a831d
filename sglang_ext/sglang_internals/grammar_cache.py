"""Compiled grammars within a bound. SGLang keeps each one for ever, twice, and compiles in as many threads as
a pool has by default: distinct schemas took memory until the server ended, and slow ones every thread."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

BACKEND = "sglang.srt.constrained.base_grammar_backend.BaseGrammarBackend.__init__"
COMPILER = "sglang.srt.constrained.xgrammar_backend.XGrammarGrammarBackend.__init__"
MAX_BYTES = 256 * 2**20
MAX_ENTRIES = 1024
IN_FLIGHT = 2  # grammars that are compiled at a time; others wait
_BYTES_OF_OTHERS = 2**10  # of a grammar that does not say its size: an invalid one


class GrammarCache(OrderedDict[Any, Any]):
    """SGLang's ``cache`` of grammars by key, least recently used first. Only `get` counts as a use."""

    def __init__(self, max_bytes: int = MAX_BYTES, max_entries: int = MAX_ENTRIES) -> None:
        super().__init__()
        self._max_bytes, self._max_entries = max_bytes, max_entries
        self._sizes: dict[Any, int] = {}
        self.bytes = 0

    def get(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            return default
        self.move_to_end(key)
        return self[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        if key in self:
            del self[key]
        super().__setitem__(key, value)
        self._sizes[key] = size = _size(key, value)
        self.bytes += size
        while self and (self.bytes > self._max_bytes or len(self) > self._max_entries):
            del self[next(iter(self))]

    def __delitem__(self, key: Any) -> None:
        super().__delitem__(key)
        self.bytes -= self._sizes.pop(key)

    def clear(self) -> None:
        super().clear()
        self._sizes.clear()
        self.bytes = 0


def _size(key: Any, value: Any) -> int:
    while (inner := getattr(value, "grammar", None)) is not None:  # one that reasons first
        value = inner
    size = getattr(getattr(value, "ctx", None), "memory_size_bytes", _BYTES_OF_OTHERS)
    return int(size) + sum(sys.getsizeof(part) for part in key)


def after_backend(result: Any, backend: Any) -> Any:
    """Run after `BaseGrammarBackend.__init__`."""
    backend.cache = GrammarCache()
    backend.executor = ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="grammar")
    return result


def around_compiler(original: Callable[..., Any], backend: Any, *args: Any, **kwargs: Any) -> Any:
    """Run around `XGrammarGrammarBackend.__init__`: its compiler keeps nothing of its own."""
    from sglang.srt.constrained import xgrammar_backend

    compiler = xgrammar_backend.GrammarCompiler
    xgrammar_backend.GrammarCompiler = partial(compiler, cache_enabled=False)
    try:
        return original(backend, *args, **kwargs)
    finally:
        xgrammar_backend.GrammarCompiler = compiler
