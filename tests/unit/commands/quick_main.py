"""`ragserve` as a process that starts in a second, for tests of what a kill or a full disk leaves behind.

Importing torch and a model for vectors that no such test reads would take nine tenths of its time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ragserve import cli
from ragserve.config import load
from ragserve.ingest import pipeline
from ragserve.retrieval.embedder import Embedder, embedder_name
from tests.unit.api.word_embedder import WordEmbedder

HELD = "hold-the-embedder"
_SMALL = 16  # chunks


class QuickEmbedder(WordEmbedder):
    """Passes for the embedder of the default settings."""

    name = embedder_name(load())


class _SlowEmbedder(QuickEmbedder):
    """Takes its time, as a model does. Where there is a file `HELD` in the working directory, it gets small
    batches and waits after the first ones, which are written meanwhile, until the file is gone: so a test can
    end the run before its last batch."""

    def __init__(self) -> None:
        super().__init__()
        if Path(HELD).exists():
            pipeline._START_CHUNKS = pipeline._BATCH_CHUNKS = _SMALL

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        time.sleep(0.3)
        while len(self.calls) > 3 and Path(HELD).exists():
            time.sleep(0.01)
        return super().encode(texts)


def main() -> None:
    def of(*_: Any) -> Any:
        return _SlowEmbedder()

    Embedder.of = of  # type: ignore[method-assign]
    cli.main()


if __name__ == "__main__":
    main()
