"""The server's prompt layout as text, for SGLang frontend programs, which send text.

SGLang tokenises the text of a program's state as one string and recognises special tokens anywhere; the
server tokenises each segment by itself. If the template separates segments by special tokens, as most do, the
ids are the same and the prefix cache is shared; otherwise only the answers are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ragserve.answering.chat_template import ChatLayout, Piece
from ragserve.answering.messages import Message
from ragserve.answering.prompt import PromptBuilder, PromptDocument, load_tokenizer
from ragserve.errors import InvalidRequest

_BREAK = "\u200b"  # zero-width space
_QUESTION, _ANSWER = "\ue000asked\ue001", "\ue000answered\ue001"


class PromptText:
    """Writes the parts of a prompt as text. Thread-safe."""

    def __init__(self, tokenizer: Any, max_prompt_tokens: int, system: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._layout = ChatLayout(tokenizer)
        self.builder = PromptBuilder(tokenizer, system)
        self._max_prompt_tokens = max_prompt_tokens
        self._system = system
        # SGLang tokenises with the tokenizer's own additions: a BOS token must not be written twice.
        added = tokenizer("x").input_ids[: 1 if tokenizer.bos_token_id is not None else 0]
        self._written_by_tokenizer = str(tokenizer.bos_token) if added == [tokenizer.bos_token_id] else ""
        self._eos = str(tokenizer.eos_token or "")
        self.stop = self._layout.stop

    @classmethod
    def of(cls, info: Mapping[str, Any], tokenizer: str | None, system: str | None) -> PromptText:
        """Build it from ``GET /info``. Raises ``InvalidRequest`` if the tokenizer is not on this machine."""
        name = tokenizer or str(info["tokenizer"])
        try:
            loaded = load_tokenizer(name)
        except (OSError, ValueError) as error:
            raise InvalidRequest(
                f"The server's tokenizer {name!r} cannot be loaded here: {str(error).splitlines()[0]}",
                hint="Give Rag(tokenizer=...) a folder on this machine or a Hugging Face id.",
            ) from error
        return cls(
            loaded,
            int(info["limits"]["max_context_tokens"]),
            system if system is not None else info.get("system_prompt"),
        )

    def fitting(self, documents: Sequence[tuple[str, str]], reserve: int) -> int:
        """Count the leading ``(title, text)`` documents that leave ``reserve`` tokens of the context.

        Raises ``PromptTooLong`` if not even the system text does."""
        laid_out = [PromptDocument("", title, text) for title, text in documents]
        return self.builder.build(
            "", laid_out, max_prompt_tokens=self._max_prompt_tokens - reserve
        ).documents_kept

    def fitting_behind(
        self, said: str, question: str, documents: Sequence[tuple[str, str]], reserve: int
    ) -> int:
        """Count the leading ``(title, text)`` documents that leave ``reserve`` tokens of the context behind
        what a state has ``said``, with a further question."""
        room = self._max_prompt_tokens - reserve
        kept = len(documents)
        while kept and self._count(said + self.follow_up(question, documents[:kept])) > room:
            kept -= 1
        return kept

    def start(self) -> str:
        """Text before the first document."""
        return self._text(self._layout.head(self._system, has_documents=True)).removeprefix(
            self._written_by_tokenizer
        )

    def document(self, title: str, text: str) -> str:
        """Text of a document, the same at any place."""
        return self._text(self._layout.document(title, text))

    def question(self, question: str) -> str:
        """Text of the question, up to the start of the answer."""
        return self._text(self._layout.question(question, (), has_documents=True))

    def follow_up(self, question: str, documents: Sequence[tuple[str, str]] = ()) -> str:
        """Text between two answers: the end of the turn, further ``(title, text)`` documents, and the next
        question."""
        parts = self._layout.follow_up(question, has_documents=bool(documents))
        if parts is None:
            raise InvalidRequest(
                "The model's chat template drops earlier answers, so a state cannot hold a follow-up.",
                hint="Ask in a fork of the state before the first question.",
            )
        added = [piece for document in documents for piece in self._layout.document(*document)]
        return self._text([*parts[0], *added, *parts[1]])

    def written(self, ids: Sequence[int]) -> str:
        """Text of a prompt's token ids from its beginning on; what is no special token stays plain."""
        text, run = "", list[int]()
        for token in [*ids, None]:
            special = None if token is None else self._layout.special_ids.get(token)
            if token is None or special is not None:
                plain = self._tokenizer.decode(
                    run, skip_special_tokens=False, clean_up_tokenization_spaces=False
                )
                text, run = text + self._harmless(str(plain)) + (special or ""), []
            else:
                run.append(token)
        return text.removeprefix(self._written_by_tokenizer)

    def answer_start(self) -> str:
        """Text that the template writes directly before an answer: nothing, or a space."""
        pieces = self._layout.question(
            _QUESTION, (Message("user", _QUESTION), Message("assistant", _ANSWER)), has_documents=True
        )
        text = "".join(text for text, _ in pieces)
        asked = "".join(text for text, _ in self._layout.question(_QUESTION, (), has_documents=True))
        before = text.partition(_ANSWER)[0]
        return before.removeprefix(asked) if before.startswith(asked) else ""

    def answer_end(self) -> str:
        """The token that ends an answer if the template writes one, else nothing."""
        after = self._layout.follow_up("", has_documents=False)
        return (
            self._eos
            if self._eos and after is not None and self._text(after[1]).startswith(self._eos)
            else ""
        )

    def _count(self, text: str) -> int:
        return len(self._tokenizer(text).input_ids)

    def _text(self, pieces: Sequence[Piece]) -> str:
        return "".join(text if trusted else self._harmless(text) for text, trusted in pieces)

    def _harmless(self, text: str) -> str:
        """Break special tokens in text of users and documents apart, so that they stay plain words."""
        specials = self._layout.special_tokens
        if specials is None:
            return text
        return specials.sub(lambda found: found[0][0] + _BREAK + found[0][1:], text)
