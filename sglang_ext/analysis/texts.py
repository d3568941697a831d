"""The tokenizer's part in the analysis: two unrelated texts as token ids, and tokens that end a sentence."""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.resources import files
from typing import Any

import torch

from sglang_ext.wire.sentence_ends import ends_sentence

log = logging.getLogger(__name__)
TOKENS = 512  # per unrelated text: several passages, and little beside a model's weights
FIXED = "fixed"  # names the first of the unrelated texts as the documents' prefix
LONGEST_PREFIX = 1024  # tokens; longer ones were not measured
_BEHIND = b"the first"  # of the unrelated texts: analyses made behind all of them have another digest
LONGEST = 64  # tokens per sentence; longer ones are cut, so that tables and code have sentences, too


def numbers(batch: Sequence[Sequence[int]]) -> list[str]:
    """Runs of token ids, written as numbers."""
    return [" ".join(map(str, ids)) for ids in batch]


@dataclass(frozen=True, eq=False)
class Texts:
    """``unrelated``: texts in which retrieval heads are looked for. A document is placed behind the first, to
    see which of its tokens depend on what precedes it (docs/methods.md, section 6). ``ends`` bool
    [vocabulary]: tokens whose own text ends a sentence or holds a line break. ``read``: texts of several runs
    of token ids; without a tokenizer every id is a word.
    """

    unrelated: list[list[int]]
    ends: torch.Tensor
    read: Callable[[Sequence[Sequence[int]]], list[str]] = numbers

    @classmethod
    def of(cls, tokenizer: Any, vocabulary: int) -> Texts:
        """Make them from a Hugging Face tokenizer."""
        ids = torch.arange(vocabulary)[:, None].tolist()
        written = tokenizer.batch_decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        ends = torch.tensor([_ends(text) for text in written], dtype=torch.bool)
        read = partial(tokenizer.batch_decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return cls(unrelated_contexts(tokenizer), ends, read)

    @classmethod
    def drawn(cls, vocabulary: int) -> Texts:
        """Make them without a tokenizer: random token ids are as unrelated to any document. Every sentence
        then has 64 tokens.
        """
        drawn = torch.randint(0, vocabulary, (2, TOKENS), generator=torch.Generator().manual_seed(0))
        return cls(
            [[int(token) for token in row] for row in drawn], torch.zeros(vocabulary, dtype=torch.bool)
        )

    @cached_property
    def digest(self) -> str:
        """Digest of both, by which a stored analysis shows which tokenizer and texts it was made with."""
        found = hashlib.blake2b(self.ends.numpy().tobytes(), digest_size=8, person=_BEHIND)
        for ids in self.unrelated:
            found.update(b"|" + array("q", ids).tobytes())
        return found.hexdigest()

    def begins(self, ids: Sequence[int]) -> torch.Tensor:
        """Mark where sentences begin, u8 [tokens]: at a document's first token, behind an end, and at every
        64th token of a long sentence.
        """
        tokens = torch.tensor(ids, dtype=torch.int64).clamp(max=len(self.ends) - 1)
        begins = torch.ones(len(tokens), dtype=torch.bool)
        begins[1:] = self.ends[tokens[:-1]]
        place = torch.arange(len(tokens))
        start = torch.where(begins, place, 0).cummax(0).values
        return (begins | ((place - start) % LONGEST == 0)).to(torch.uint8)


def prefix_of(tokenizer: Any, text: str, limit: int = LONGEST_PREFIX) -> list[int]:
    """Token ids of the text that documents are prefilled behind; of the text shipped with the package, which
    `FIXED` names, as many as of an unrelated text."""
    if text == FIXED:
        return next(iter(unrelated_contexts(tokenizer)), [])
    return list(tokenizer(text.strip(), add_special_tokens=False).input_ids[:limit])


def digest_of(prefix: Sequence[int]) -> str:
    """Eight hex digits of a prefix; empty for none."""
    return hashlib.blake2b(array("q", prefix).tobytes(), digest_size=4).hexdigest() if prefix else ""


def unrelated_contexts(tokenizer: Any, limit: int = TOKENS) -> list[list[int]]:
    """Token ids of the two texts shipped with the package, each cut to ``limit`` tokens."""
    text = files("sglang_ext.analysis").joinpath("unrelated_contexts.txt").read_text(encoding="utf-8")
    ids: Sequence[list[int]] = [
        tokenizer(part.strip(), add_special_tokens=False).input_ids[:limit] for part in text.split("\n====\n")
    ]
    return [list(part) for part in ids if part]


def _ends(text: str) -> bool:
    return "\n" in text or ends_sentence(text)
