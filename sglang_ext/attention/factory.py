"""Makes SGLang's attention backends with sparse decoding around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_ext.attention.backend import SparseDecodeBackend
from sglang_ext.attention.config import AttentionConfig
from sglang_ext.attention.engine_checks import check_engine
from sglang_ext.state import current


def wrapping(make: Callable[[Any], Any], config: AttentionConfig) -> Callable[[Any], Any]:
    """The factory of a backend, as SGLang's registry has it, with ours around what it makes."""

    def factory(runner: Any) -> Any:
        from sglang_ext.attention.decode_runtime import DecodeRuntime

        check_engine(runner, config)
        backend = SparseDecodeBackend(make(runner), runner, config)
        current.attention = DecodeRuntime(backend)
        return backend

    return factory
