"""The prompt as token ids: system | documents | question, each segment tokenised by itself.

A document's ids then never depend on its neighbours or its place, which is what lets its KV be computed once,
alone, and reused. The layout comes from the model's chat template where it has one (`layout.py`); text of
users and documents can never become a special token, so a document cannot end its own segment or speak as the
system."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ragserve.answering.chat_template import ChatLayout, Message
from ragserve.errors import PromptTooLong, Unavailable

__all__ = ["Message", "Prompt", "PromptBuilder", "PromptDocument", "Segment"]

_CACHED_DOCUMENTS = 4096


@dataclass(frozen=True, slots=True)
class PromptDocument:
    """A document to put into the prompt; ``key`` is handed back in its segment."""

    key: str
    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Segment:
    """``input_ids[start:end]``; document segments carry the document's key."""

    kind: Literal["system", "document", "question"]
    start: int
    end: int
    key: str = ""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids and where the segments are. ``tokens_retrieved`` counts all documents, ``tokens_kept`` those
    that fitted.
    """

    input_ids: list[int]
    segments: tuple[Segment, ...]
    documents_kept: int
    tokens_retrieved: int
    tokens_kept: int
    stop: tuple[str, ...] = ()


class PromptBuilder:
    """Lays out prompts for one tokenizer. Thread-safe."""

    def __init__(self, tokenizer: Any, system_prompt: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._system = system_prompt
        self._layout = ChatLayout(tokenizer)
        self._documents: OrderedDict[tuple[str, str], list[int]] = OrderedDict()
        self._prefixes: dict[str | None, list[int]] = {}
        self._lock = threading.Lock()

    @classmethod
    def load(cls, tokenizer: str, system_prompt: str | None = None) -> PromptBuilder:
        """The tokenizer of a model folder or Hugging Face id. Raises Unavailable where there is none."""
        try:
            return cls(load_tokenizer(tokenizer), system_prompt)
        except (OSError, ValueError) as error:
            raise Unavailable(
                f"No tokenizer at {tokenizer!r}: {str(error).splitlines()[0]}",
                hint="Give the folder of the model that the engine serves with --tokenizer.",
                code="tokenizer_missing",
            ) from error

    def count(self, text: str) -> int:
        """Tokens of a text on its own, special tokens not recognised."""
        return len(self._layout.encode([(text, False)]))

    def build(
        self,
        question: str,
        documents: Sequence[PromptDocument],
        *,
        max_prompt_tokens: int,
        history: Sequence[Message] = (),
        system: str | None = None,
    ) -> Prompt:
        """Lay out one prompt of at most ``max_prompt_tokens``.

        Documents that do not fit are left out from the end on (they come best first), a whole document at a
        time. Raises PromptTooLong when question, history and system text alone do not fit."""
        head = self._head(system if system is not None else self._system, has_documents=bool(documents))
        tail = self._layout.encode(self._layout.question(question, history, has_documents=bool(documents)))
        room = max_prompt_tokens - len(head) - len(tail)
        if room < 0:
            raise PromptTooLong(
                f"The question (with history and system text) takes {len(head) + len(tail)} tokens and the context has room for "
                f"{max_prompt_tokens}.",
                hint="Shorten the question or history, or lower max_new_tokens.",
                param="query",
            )
        ids = list(head)
        segments = [Segment("system", 0, len(head))]
        retrieved = kept_tokens = kept = 0
        fits = True
        for document in documents:
            tokens = self._document(document)
            retrieved += len(tokens)
            fits = fits and kept_tokens + len(tokens) <= room
            if fits:
                segments.append(Segment("document", len(ids), len(ids) + len(tokens), document.key))
                ids += tokens
                kept += 1
                kept_tokens += len(tokens)
        segments.append(Segment("question", len(ids), len(ids) + len(tail)))
        return Prompt(ids + tail, tuple(segments), kept, retrieved, kept_tokens, self._layout.stop)

    def text(
        self,
        part: Literal["system", "document", "question"],
        *,
        title: str = "",
        text: str = "",
        system: str | None = None,
    ) -> str:
        """A segment as text, for clients that send text (SGLang frontend programs). Special tokens in it are
        spelled out.
        """
        if part == "system":
            pieces = self._layout.head(system if system is not None else self._system, has_documents=True)
        elif part == "document":
            pieces = self._layout.document(title, text)
        else:
            pieces = self._layout.question(text, (), has_documents=True)
        return "".join(piece for piece, _ in pieces)

    def system_ids(self) -> list[int]:
        """Token ids before the first document, unless a query brings a system text of its own."""
        return self._head(self._system, has_documents=True)

    def document_ids(self, title: str, text: str) -> list[int]:
        """Token ids of a document's segment, the same in every prompt."""
        return self._document(PromptDocument("", title, text))

    def _head(self, system: str | None, *, has_documents: bool) -> list[int]:
        if system is not None and system != self._system:  # a request's own: not worth keeping
            return self._layout.encode(self._layout.head(system, has_documents=has_documents))
        key = f"{has_documents}"
        if key not in self._prefixes:
            self._prefixes[key] = self._layout.encode(self._layout.head(system, has_documents=has_documents))
        return self._prefixes[key]

    def _document(self, document: PromptDocument) -> list[int]:
        key = (document.title, document.text)
        with self._lock:
            if key in self._documents:
                self._documents.move_to_end(key)
                return self._documents[key]
        tokens = self._layout.encode(self._layout.document(document.title, document.text))
        with self._lock:
            self._documents[key] = tokens
            while len(self._documents) > _CACHED_DOCUMENTS:
                self._documents.popitem(last=False)
        return tokens


def load_tokenizer(path: str) -> Any:
    """A Hugging Face tokenizer, from a folder without looking at the network."""
    import os

    from ragserve.engine.compat import prepare

    prepare()  # transformers imports torchvision
    from transformers import AutoTokenizer

    offline = Path(path).exists() or bool(os.environ.get("HF_HUB_OFFLINE"))
    return AutoTokenizer.from_pretrained(path, local_files_only=offline)
