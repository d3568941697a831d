"""Old names that still work, for one release, with a warning. Plain data, without torch or SGLang."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from typing import Any

log = logging.getLogger(__name__)

SETTINGS = {
    "decode_hosted": "decode_offload",
    "kv_hosted_bytes": "kv_offload_bytes",
    "kv_hosted_tokens": "kv_offload_tokens",
}
DECODE = {"hosted": "offloaded", "columns": "resident_blocks"}
PREFILL_MODES = {"lines": "vertical_slash", "blocks": "block_sparse"}  # values of `mode` and `prefill_mode`


def with_new_names(given: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return ``given`` with the new names of ``names``. Raises ValueError for a value under both names."""
    if both := [old for old in names if old in given and names[old] in given]:
        raise ValueError(f"{both[0]} is the old name of {names[both[0]]}: give only {names[both[0]]}")
    for old in names:
        if old in given:
            warn(old, names[old])
    return {names.get(name, name): value for name, value in given.items()}


def with_new_mode(value: Any) -> Any:
    """Return the new name of a prefill mode; anything else as it is."""
    if isinstance(value, str) and value in PREFILL_MODES:
        warn(value, PREFILL_MODES[value])
        return PREFILL_MODES[value]
    return value


@cache
def warn(old: str, new: str) -> None:
    """Log once a process that a name is old."""
    log.warning("%s is an old name and will go in the next release: write %s", old, new)
