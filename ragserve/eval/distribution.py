"""Compare next-token distributions."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

from ragserve.errors import EngineError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def decode(text: str | None) -> NDArray[np.float64]:
    """Decode an engine's log-probabilities [vocabulary]. Raises EngineError if it sent none."""
    import numpy as np

    if not text:
        raise EngineError(
            "The engine sent no distribution of the first token.",
            hint="Does another version of ragserve run there?",
        )
    return np.frombuffer(base64.b64decode(text), dtype="<f4").astype(np.float64)


def kl(full: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """KL(full || other) in nats, from log-probabilities [vocabulary]; never below 0."""
    import numpy as np

    return max(0.0, float(np.sum(np.exp(full) * (full - other))))
