"""Compiled grammars stay within a bound, however many distinct ones clients send."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from ragserve.config import DEFAULT_MODEL
from sglang_ext.sglang_internals.grammar_cache import (
    IN_FLIGHT,
    MAX_ENTRIES,
    GrammarCache,
    after_backend,
    around_compiler,
)


def grammar(size: int) -> Any:
    return SimpleNamespace(ctx=SimpleNamespace(memory_size_bytes=size))


def test_the_least_recently_used_go_first() -> None:
    cache = GrammarCache(max_bytes=4000)
    for name in "abc":
        cache["json", name] = grammar(1000)
    assert cache.get(("json", "a")) is not None
    cache["json", "d"] = grammar(1000)
    assert [name for _, name in cache] == ["c", "a", "d"]
    cache["json", "a"] = grammar(2000)
    assert [name for _, name in cache] == ["d", "a"]
    cache["json", "huge"] = grammar(10**6)
    assert (len(cache), cache.bytes) == (0, 0)
    assert cache.get(("json", "huge")) is None
    cache["json", "a"] = SimpleNamespace(grammar=grammar(3000))  # one that reasons first
    assert cache.bytes > 3000
    cache.clear()
    assert (len(cache), cache.bytes) == (0, 0)


def test_invalid_ones_are_bounded_by_their_number() -> None:
    cache = GrammarCache()
    for number in range(3 * MAX_ENTRIES):
        cache["json", str(number)] = SimpleNamespace()
    assert len(cache) == MAX_ENTRIES
    assert cache.bytes < 4 * 2**20


def test_a_thousand_schemas_take_no_more_than_the_bound() -> None:
    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEFAULT_MODEL)
    backend = object.__new__(XGrammarGrammarBackend)
    around_compiler(XGrammarGrammarBackend.__init__, backend, tokenizer, len(tokenizer))
    after_backend(None, backend)
    backend.cache = cache = GrammarCache(max_bytes=2**20)
    most = 0
    for number in range(1000):
        key = ("json", json.dumps({"type": "object", "properties": {f"p{number}": {"type": "integer"}}}))
        compiled, hit = backend.get_cached_or_future_value(key, False)
        assert not hit
        backend.set_cache(key, compiled.result().copy())
        most = max(most, cache.bytes)
        assert backend.get_cached_or_future_value(key, False)[1]
    assert 2**19 < most <= 2**20
    assert len(cache) < 1000
    assert backend.grammar_compiler.get_cache_size_bytes() == 0
    assert backend.executor._max_workers == IN_FLIGHT


@pytest.mark.parametrize("hook", ["BACKEND", "COMPILER"])
def test_the_table_of_hooks_has_both(hook: str) -> None:
    from sglang_ext.process.hooks import HOOKS
    from sglang_ext.sglang_internals import grammar_cache

    assert getattr(grammar_cache, hook) in [each.target for each in HOOKS]
