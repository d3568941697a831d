"""What the server says of the documents' KV to the processes of its engine."""

from __future__ import annotations

import json
import os
from typing import Any

from sglang_ext.wire.protocol import KV_CONFIG_VARIABLE


def kv_config() -> dict[str, Any]:
    """Return the settings of this process's server; empty if it has none."""
    found: dict[str, Any] = json.loads(os.environ.get(KV_CONFIG_VARIABLE, "{}"))
    return found


def page_bits(config: dict[str, Any]) -> int:
    """Return the bits of a value in a document's pages."""
    return int(config.get("page_bits", 16))
