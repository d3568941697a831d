"""Learn which KV heads of a model may stream.

`sglang_ext.attention.pools.calibration` does the work. It is imported on use, because it loads torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ragserve.errors import RagserveError


def calibrate_heads(out: Path, **options: Any) -> list[dict[str, Any]]:
    """Learn gates, write the pattern file ``out`` and return rows of what streaming heads cost.

    ``options`` are those of `sglang_ext.attention.pools.calibration.calibrate`. Raises RagserveError, and
    writes nothing, where values are not finite.
    """
    from ragserve.engine.compat import prepare

    prepare()
    from sglang_ext.attention.pools.calibration import calibrate

    try:
        return calibrate(out, **options)
    except FloatingPointError as error:
        raise RagserveError(
            f"Nothing is written: {error}.",
            hint="Look at the model's weights, or at what else uses the GPU. --device cpu does without it.",
        ) from error
