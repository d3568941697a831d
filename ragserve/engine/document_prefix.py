"""The text that documents are prefilled behind (`kv_prefix`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ragserve.config import Settings
from ragserve.errors import InvalidRequest

_PREFIX_CHARS = 2**15  # of a text that documents are prefilled behind; 1,024 tokens of it are used


def prefix_ids(settings: Settings, tokenizer: Any) -> list[int]:
    """Token ids of the prefix, as the engine computes documents behind it; none without one. Raises
    InvalidRequest for a file that cannot be read."""
    from sglang_ext.analysis.texts import prefix_of

    text = prefix_text(settings)
    return prefix_of(tokenizer, text) if text else []


def prefix_text(settings: Settings) -> str:
    """Read the text of `kv_prefix`; empty for none. Raises InvalidRequest for a file that cannot be read."""
    if settings.kv_prefix in ("fixed", "none"):
        return "" if settings.kv_prefix == "none" else settings.kv_prefix
    try:
        with Path(settings.kv_prefix).open(encoding="utf-8") as file:
            text = file.read(_PREFIX_CHARS).strip()
    except (OSError, ValueError) as error:
        raise InvalidRequest(
            f"kv_prefix: {settings.kv_prefix} cannot be read: {error}",
            hint="Give fixed, none, or the path of a text file in UTF-8.",
            param="kv_prefix",
        ) from None
    if not text:
        raise InvalidRequest(
            f"kv_prefix: {settings.kv_prefix} has no text.",
            hint="Give none to prefill documents alone.",
            param="kv_prefix",
        )
    return text
