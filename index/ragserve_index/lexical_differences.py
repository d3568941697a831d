"""How a lexical index differs from the chunks."""

from __future__ import annotations

import numpy as np

from ragserve_index.structures.base import Ids


def differences(have: Ids, expected: Ids) -> list[str]:
    """Say how the ids in a lexical index differ from those of the chunks."""
    return [
        f"{len(found)} {text}: {found[:5].tolist()}"
        for found, text in (
            (np.setdiff1d(expected, have), "chunks are missing from the lexical index"),
            (np.setdiff1d(have, expected), "ids in the lexical index have no chunk"),
        )
        if len(found)
    ]
