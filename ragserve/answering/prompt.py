"""Build the prompt's token ids: system | documents | question, each segment tokenised by itself.

A document's ids never depend on its neighbours or its place, so its KV can be computed once, alone, and
reused. The layout comes from the model's chat template if it has one (`chat_template.py`). Text of users and
documents never becomes a special token, so a document cannot end its own segment or speak as the system."""

from __future__ import annotations

import hashlib
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ragserve.answering.chat_template import ChatLayout
from ragserve.answering.messages import Message
from ragserve.engine.tool_calls import Tools
from ragserve.errors import InvalidRequest, PromptTooLong, Unavailable
from sglang_ext.wire.joint_names import names_of
from sglang_ext.wire.protocol import Span

__all__ = ["Message", "Prompt", "PromptBuilder", "PromptDocument", "Segment"]

_Asked = tuple[str, tuple[Message, ...], tuple[Message, ...]]  # question, history, turns
_CACHED_DOCUMENTS = 4096
_CACHED_TOKENS = 2**21  # of all of them together, about 80 MB
_READ_CHARS = 32  # for each token of room: of texts with more characters the rest is not tokenised
_LEAST_READ = 2**18
_CHARS_PER_TOKEN = 4  # of what is not read, by guess


@dataclass(frozen=True, slots=True)
class PromptDocument:
    """A document for the prompt; ``key`` comes back in its segment."""

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
    """Token ids with their segments.

    ``tokens_retrieved`` counts all documents, those far too long for the context by a guess, ``tokens_kept``
    those that fit; ``left_out``: documents that the strategy leaves out, whether they fit or not."""

    input_ids: list[int]
    segments: tuple[Segment, ...]
    documents_kept: int
    tokens_retrieved: int
    tokens_kept: int
    stop: tuple[str, ...] = ()
    room: int = 0  # tokens that documents could have had
    cut_to: int | None = None  # characters left of the last kept document's text; None: all of them
    left_out: int = 0

    @property
    def spans(self) -> tuple[Span, ...]:
        """The system text and each document, as a `GenerateRequest` wants them."""
        return tuple(Span(each.start, each.end) for each in self.segments if each.kind != "question")

    def owners(self, namespace: str) -> tuple[str, ...]:
        """The namespace of each span, as a `GenerateRequest` wants them: the documents' keys. The system text
        is the first one's. Empty for a prompt in one namespace."""
        first, *others = names_of(namespace)
        if not others:
            return ()
        return tuple(each.key or first for each in self.segments if each.kind != "question")


class PromptBuilder:
    """Lays out prompts for one tokenizer. Thread-safe."""

    def __init__(self, tokenizer: Any, system_prompt: str | None = None) -> None:
        self.tokenizer = tokenizer
        self._system = system_prompt
        self._layout = ChatLayout(tokenizer)
        self._documents: OrderedDict[tuple[str, str], list[int]] = OrderedDict()
        self._cached_tokens = 0
        self._heads: dict[bool, list[int]] = {}
        self._last_tail: tuple[tuple[_Asked, bool] | None, list[int]] = None, []
        self._lock = threading.Lock()

    @classmethod
    def load(cls, tokenizer: str, system_prompt: str | None = None) -> PromptBuilder:
        """Load the tokenizer of a model folder or Hugging Face id. Raises Unavailable on failure."""
        try:
            return cls(load_tokenizer(tokenizer), system_prompt)
        except (OSError, ValueError) as error:
            raise Unavailable(
                f"No tokenizer at {tokenizer!r}: {str(error).splitlines()[0]}",
                hint="Give the folder of the model that the engine serves with --tokenizer.",
                code="tokenizer_missing",
            ) from error

    @property
    def offers_tools(self) -> bool:
        """The model's template writes tools, their calls and their results."""
        return self._layout.offers_tools

    def plain_ids(self, text: str) -> list[int]:
        """Token ids of a text alone, special tokens not recognised."""
        return self._layout.encode([(text, False)])

    def count(self, text: str) -> int:
        """Count the tokens of a text alone, as `plain_ids` has them."""
        return len(self.plain_ids(text))

    def build(
        self,
        question: str,
        documents: Sequence[PromptDocument],
        *,
        max_prompt_tokens: int,
        history: Sequence[Message] = (),
        system: str | None = None,
        cut: bool = False,
        turns: Sequence[Message] = (),
        tools: Tools = (),
        default: str | None = None,
    ) -> Prompt:
        """Lay out one prompt of at most ``max_prompt_tokens``.

        The first document that does not fit and all after it are left out (the best come first). With ``cut``
        the beginning of its text stays, as much as fits. ``turns``: calls of tools and their results behind
        the question. ``tools``: only of a template that `offers_tools`. ``default``: our system text where
        neither the request, the server nor the template has one. Raises
        PromptTooLong if question, history and system text alone do not fit, and InvalidRequest if the
        template refuses the messages."""
        own = sum(each.chars for each in (*history, *turns)) + len(question) + len(system or "")
        if own > most_read(max_prompt_tokens):
            raise PromptTooLong(
                f"The question (with history and system text) has {own:,} characters and the context has "
                f"room for {max_prompt_tokens:,} tokens.",
                hint="Shorten the question or history.",
                param="query",
            )
        text = self._system if system is None else system
        if text is None and self._layout.form != "documents":
            text = default
        with_documents = bool(documents)
        try:
            if tools:
                pieces = self._layout.with_tools(
                    text, question, history, turns, tools, has_documents=with_documents
                )
                head, tail = map(self._layout.encode, pieces)
            else:
                head = self._head(text, has_documents=with_documents)
                tail = self._tail((question, (*history,), (*turns,)), has_documents=with_documents)
        except _template_errors() as error:
            raise InvalidRequest(
                f"The model's chat template refuses these messages: {error}",
                hint="Its turns of user and assistant may have to alternate.",
                param="messages",
            ) from error
        return self._fitted(head, documents, tail, max_prompt_tokens, cut=cut)

    def follow_up(
        self,
        dialogue: Sequence[int],
        question: str,
        documents: Sequence[PromptDocument],
        *,
        max_prompt_tokens: int,
        cut: bool = False,
    ) -> Prompt:
        """Lay out the next turn behind the ids of a ``dialogue`` that ends with an answer; they become the
        system segment. Else as `build`; where no document fits, the question alone.

        Raises InvalidRequest if the model's template drops earlier answers."""
        parts = self._layout.follow_up(question, has_documents=bool(documents))
        if parts is None:
            raise InvalidRequest(
                "The model's chat template drops earlier answers, so it cannot have sessions.",
                hint="Send the earlier turns as history.",
                param="session",
            )
        before, tail = map(self._layout.encode, parts)
        prompt = self._fitted([*dialogue, *before], documents, tail, max_prompt_tokens, cut=cut)
        if prompt.documents_kept or not documents:
            return prompt
        alone = self.follow_up(dialogue, question, (), max_prompt_tokens=max_prompt_tokens)
        return replace(alone, tokens_retrieved=prompt.tokens_retrieved)

    def fingerprint(self) -> str:
        """16 hex digits over what determines a prompt's ids: the tokenizer, the template, our texts in it and
        the server's system text. Takes tens of milliseconds."""
        documents, history = [PromptDocument("", "t", "x")], [Message("user", "a"), Message("assistant", "b")]
        ids = self.build("q", documents, max_prompt_tokens=sys.maxsize, history=history).input_ids
        parts = self._layout.follow_up("q", has_documents=True) or ()
        # the last, as a call resets what tokenizer.json says of truncation
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        vocabulary = sorted(self.tokenizer.get_vocab().items()) if backend is None else backend.to_str()
        return hashlib.blake2b(repr((ids, parts, vocabulary)).encode(), digest_size=8).hexdigest()

    def words(self, ids: Sequence[int]) -> str:
        """The text of token ids, with spaces for special tokens."""
        text = str(self.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))
        special = self._layout.special_tokens
        return special.sub(" ", text) if special else text

    def answer_ids(self, generated: Sequence[int], text: str) -> list[int]:
        """Token ids of an answer as the next turn repeats it, without what ended it."""
        return self._layout.answer_ids(generated, text)

    def _fitted(
        self,
        head: Sequence[int],
        documents: Sequence[PromptDocument],
        tail: Sequence[int],
        max_prompt_tokens: int,
        *,
        cut: bool,
    ) -> Prompt:
        room = max_prompt_tokens - len(head) - len(tail)
        if room < 0:
            raise PromptTooLong(
                f"The question (with history and system text) takes {len(head) + len(tail)} tokens and the "
                f"context has room for {max_prompt_tokens}.",
                hint="Shorten the question or history, or lower max_new_tokens.",
                param="query",
            )
        encoded, unread = self._read(documents, most_read(room))
        kept, free = 0, room
        while kept < len(encoded) and len(encoded[kept]) <= free:
            free -= len(encoded[kept])
            kept += 1
        shown, cut_to = encoded[:kept], None
        if cut and kept < len(documents):
            cut_to, beginning = self._beginning(documents[kept], free)
            shown += [beginning] if cut_to else []
        ids = list(head)
        segments = [Segment("system", 0, len(head))]
        for document, tokens in zip(documents, shown, strict=False):
            segments.append(Segment("document", len(ids), len(ids) + len(tokens), document.key))
            ids += tokens
        segments.append(Segment("question", len(ids), len(ids) + len(tail)))
        return Prompt(
            [*ids, *tail],
            tuple(segments),
            len(shown),
            sum(map(len, encoded)) + unread,
            sum(map(len, shown)),
            self._layout.stop,
            room,
            cut_to or None,
        )

    def _read(self, documents: Sequence[PromptDocument], chars: int) -> tuple[list[list[int]], int]:
        """Token ids of the first documents, of so many characters together, and about how many tokens the
        others have: they do not fit."""
        read = 0
        while read < len(documents) and (chars := chars - len(documents[read].text)) >= 0:
            read += 1
        unread = sum(len(document.text) for document in documents[read:]) // _CHARS_PER_TOKEN
        return [self._document(document) for document in documents[:read]], unread

    def _beginning(self, document: PromptDocument, room: int) -> tuple[int, list[int]]:
        """Return as many characters of a document's text as fit into ``room`` tokens with its title, and its
        ids."""
        text = document.text[: most_read(room)]
        while text:
            tokens = self._layout.encode(self._layout.document(document.title, text))
            if len(tokens) <= room:
                return len(text), tokens
            text = text[: min(len(text) - 1, len(text) * max(room, 0) // len(tokens))]
        return 0, []

    def system_ids(self, system: str | None = None) -> list[int]:
        """Token ids before the first document, with the server's system text or another."""
        return self._head(self._system if system is None else system, has_documents=True)

    def document_ids(self, title: str, text: str) -> list[int]:
        """Token ids of a document's segment; the same in every prompt."""
        return self._document(PromptDocument("", title, text))

    def unread_chars(self, documents: Iterable[tuple[str, str]]) -> int:
        """Characters of those documents (title, text) whose token ids are not kept: what a prompt of them
        takes the time to tokenise."""
        with self._lock:
            return sum(len(text) for title, text in documents if (title, text) not in self._documents)

    def question_ids(self, question: str) -> list[int]:
        """Token ids of a question's text alone."""
        return self._layout.encode([(question, False)])

    def token_starts(self, title: str, text: str, characters: Sequence[int]) -> list[int]:
        """The tokens of a document's segment, counted from its first, that hold these characters of ``text``.

        Empty for a tokenizer that cannot tell."""
        return self._layout.token_starts(title, text, characters)

    def _head(self, system: str | None, *, has_documents: bool) -> list[int]:
        if system == self._system and has_documents in self._heads:
            return self._heads[has_documents]
        head = self._layout.encode(self._layout.head(system, has_documents=has_documents))
        if system == self._system:  # a request's own is not worth keeping
            self._heads[has_documents] = head
        return head

    def _tail(self, asked: _Asked, *, has_documents: bool) -> list[int]:
        """The question's segment. The last one is kept: `auto` lays out a prompt of all passages, and one of
        those that it chooses."""
        key, (kept, tail) = (asked, has_documents), self._last_tail
        if key != kept:
            tail = self._layout.encode(self._layout.question(*asked, has_documents=has_documents))
            self._last_tail = key, tail
        return tail

    def _document(self, document: PromptDocument) -> list[int]:
        key = (document.title, document.text)
        with self._lock:
            if key in self._documents:
                self._documents.move_to_end(key)
                return self._documents[key]
        tokens = self._layout.encode(self._layout.document(document.title, document.text))
        with self._lock:
            self._cached_tokens += len(tokens) - len(self._documents.get(key, ()))
            self._documents[key] = tokens
            while len(self._documents) > _CACHED_DOCUMENTS or self._cached_tokens > _CACHED_TOKENS:
                self._cached_tokens -= len(self._documents.popitem(last=False)[1])
        return tokens


def _template_errors() -> type[Exception]:
    from jinja2 import TemplateError

    return TemplateError


def most_read(tokens: int) -> int:
    """Characters of text that are tokenised to fill so many tokens: more than fit, but for the rarest."""
    return max(_LEAST_READ, _READ_CHARS * tokens)


def load_tokenizer(path: str) -> Any:
    """Load a Hugging Face tokenizer; a folder is read without the network."""
    import os

    from ragserve.engine.compat import prepare

    prepare()  # transformers imports torchvision
    from transformers import AutoTokenizer

    offline = Path(path).exists() or bool(os.environ.get("HF_HUB_OFFLINE"))
    return AutoTokenizer.from_pretrained(path, local_files_only=offline)
