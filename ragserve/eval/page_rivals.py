"""Ways to decode over chosen pages that dialogues compare, on exact KV and with the same budget."""

from __future__ import annotations

from typing import Any

RIVALS = {
    "window": "window",  # LoopServe 5.2: chosen anew by the last queries
    "last": "last query",
    "prompt": "prompt's end",  # as SnapKV: once, by the prompt's last queries
    "recent": "sink and recent",  # as StreamingLLM
}


def page_rivals(budget: int | None) -> dict[str, dict[str, Any]]:
    """Return the decode options of each rival by label; none without a ``budget`` in tokens."""
    if budget is None:
        return {}
    shared = {"mode": "hierarchical", "budget": budget, "dense_below": 0}
    return {f"prefix, {budget} by {said}": shared | {"observe": observe} for observe, said in RIVALS.items()}
