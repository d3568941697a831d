"""The serving model's tokenizer, used for counting: chunks are measured in tokens that the model will see."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragserve.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """A tokenizer as the JSON of the `tokenizers` library, which the worker process loads without
    transformers or torch.

    ``fingerprint`` is part of every content hash, since another tokenizer cuts other chunks.
    """

    json: str
    fingerprint: str

    @classmethod
    def load(cls, name: str) -> TokenizerSource:
        """Load ``name/tokenizer.json``, else use transformers' AutoTokenizer (a path, or an id in its cache).

        Raises ``InvalidRequest`` (code ``tokenizer_not_found``) if there is none or it has no fast
        implementation.
        """
        file = Path(name).expanduser() / "tokenizer.json"
        text = file.read_text(encoding="utf-8") if file.is_file() else _through_transformers(name)
        return cls(text, hashlib.blake2b(text.encode(), digest_size=16).hexdigest())


def _through_transformers(name: str) -> str:
    from ragserve.engine.compat import prepare

    prepare()
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise _not_found(f"The tokenizer of {name!r} could not be loaded: {reason}") from error
    if without_vocabulary(tokenizer):
        raise _not_found(f"{name} has no tokenizer.")
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise _not_found(
            f"The tokenizer of {name!r} has no fast implementation, so text offsets are unknown."
        )
    text: str = backend.to_str()
    return text


def without_vocabulary(tokenizer: Any) -> bool:
    """True for the empty tokenizer that transformers makes of a model's folder without tokenizer files."""
    special = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
    return set(tokenizer.get_vocab()) <= special


def _not_found(message: str) -> InvalidRequest:
    hint = "Give --tokenizer a folder with a tokenizer.json, or an id that is in the Hugging Face cache."
    return InvalidRequest(message, hint=hint, code="tokenizer_not_found", param="tokenizer")


class Counter:
    """Counts tokens and finds token boundaries. chonkie uses it as its tokenizer."""

    def __init__(self, source: TokenizerSource) -> None:
        from tokenizers import Tokenizer

        self._tokenizer: Any = Tokenizer.from_str(source.json)
        # a tokenizer.json may ask to truncate or pad model inputs; counting must not
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # the text of a special token within a document is plain text
        self._tokenizer.encode_special_tokens = True

    def __call__(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False))

    def counts(self, texts: list[str]) -> list[int]:
        """Number of tokens of each text."""
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [len(encoding) for encoding in encodings]

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """(start, end) in characters of each token. Tokens that share a character share its offsets."""
        spans: list[tuple[int, int]] = self._tokenizer.encode(text, add_special_tokens=False).offsets
        return spans
