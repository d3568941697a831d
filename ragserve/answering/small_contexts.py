"""Contexts of which `samkv` without options would keep nearly all, and compute most again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ragserve.engine.base import GenerateRequest
from sglang_ext.wire.request_options import SamKvOptions, merged, strategy_options

_NEARLY_ALL = 0.75  # with two thirds of it computed again, a composed context is half a prefill and more


def better_exact(request: GenerateRequest, defaults: Mapping[str, Any]) -> str | None:
    """Why exact prefill answers a laid-out ``request`` of `samkv` sooner, and with nothing lost; None where
    it does not, or where the request has options. ``defaults``: those of the model's profile."""
    if request.strategy != "samkv" or request.options or request.session is not None or not request.spans:
        return None
    options = strategy_options("samkv", merged(defaults, {}))
    if not isinstance(options, SamKvOptions) or not options.by_sentence or options.keep or options.top_p:
        return None
    tokens = request.spans[-1].end - request.spans[0].end
    if (options.recompute, options.share) != ("sentences", None) or options.min_tokens < _NEARLY_ALL * tokens:
        return None
    return (
        f"samkv without options keeps at least {options.min_tokens:,} tokens, of {tokens:,} here nearly all, "
        "and computes two thirds of them again: exact prefill is cheaper"
    )
