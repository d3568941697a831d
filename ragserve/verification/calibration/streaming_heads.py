"""Learn which KV heads of a model may stream.

`sglang_ext.attention.pools.calibration` does the work. It is imported on use, because it loads torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def calibrate_heads(out: Path, **options: Any) -> list[dict[str, Any]]:
    """Learn gates, write the pattern file ``out`` and return rows of what streaming heads cost.

    ``options`` are those of `sglang_ext.attention.pools.calibration.calibrate`.
    """
    from ragserve.engine.compat import prepare

    prepare()
    from sglang_ext.attention.pools.calibration import calibrate

    return calibrate(out, **options)
