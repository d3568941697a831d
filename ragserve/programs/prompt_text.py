"""The server's prompt layout as text, for clients of SGLang that send text: frontend programs.

SGLang tokenises the text of a program's state as one string, and recognises special tokens wherever they
stand. The server tokenises each segment by itself. For models whose template separates segments by special
tokens, as most do, the ids are the same and the prefix cache is shared; where not, answers are the same and
the cache is not."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ragserve.answering.chat_template import ChatLayout, Message, Piece
from ragserve.answering.prompt import PromptBuilder, PromptDocument, load_tokenizer
from ragserve.errors import InvalidRequest

_BREAK = "\u200b"  # zero-width space
_QUESTION, _ANSWER = "\ue000asked\ue001", "\ue000answered\ue001"


class PromptText:
    """Text of the parts of a prompt. Thread-safe."""

    def __init__(self, tokenizer: Any, max_prompt_tokens: int, system: str | None = None) -> None:
        self._layout = ChatLayout(tokenizer)
        self._builder = PromptBuilder(tokenizer, system)
        self._max_prompt_tokens = max_prompt_tokens
        self._system = system
        specials = {str(token) for token in getattr(tokenizer, "added_tokens_decoder", {}).values()} | set(
            tokenizer.all_special_tokens
        )
        found = sorted(filter(None, specials), key=len, reverse=True)
        self._specials = re.compile("|".join(map(re.escape, found))) if found else None
        # SGLang tokenises with the tokenizer's own additions, so a beginning that the tokenizer writes itself
        # must not be written twice.
        added = tokenizer("x").input_ids[: 1 if tokenizer.bos_token_id is not None else 0]
        self._written_by_tokenizer = str(tokenizer.bos_token) if added == [tokenizer.bos_token_id] else ""
        self._eos = str(tokenizer.eos_token or "")
        self.stop = self._layout.stop

    @classmethod
    def of(cls, info: Mapping[str, Any], tokenizer: str | None, system: str | None) -> PromptText:
        """From what ``GET /info`` says. Raises ``InvalidRequest`` where the server's tokenizer is not on this
        machine.
        """
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
        """How many of these ``(title, text)``, from the first on, leave ``reserve`` tokens of the context.
        Raises ``PromptTooLong``.
        """
        laid_out = [PromptDocument("", title, text) for title, text in documents]
        return self._builder.build(
            "", laid_out, max_prompt_tokens=self._max_prompt_tokens - reserve
        ).documents_kept

    def start(self) -> str:
        """All that comes before the first document."""
        return self._text(self._layout.head(self._system, has_documents=True)).removeprefix(
            self._written_by_tokenizer
        )

    def document(self, title: str, text: str) -> str:
        """One document, the same wherever it stands."""
        return self._text(self._layout.document(title, text))

    def question(self, question: str) -> str:
        """The question, up to where the answer begins."""
        return self._text(self._layout.question(question, (), has_documents=True))

    def follow_up(self, question: str) -> str:
        """What stands between an answer and the next answer: the end of the turn, and the next question."""
        text = self._after_answer(question)
        if text is None:
            raise InvalidRequest(
                "The model's chat template does not keep earlier answers, so there is no follow-up in the same state.",
                hint="Ask in a fork of the state as it was before the first question.",
            )
        return text

    def answer_start(self) -> str:
        """What the template writes between the place where an answer begins and the answer: nothing, or a
        space.
        """
        pieces = self._layout.question(
            _QUESTION, (Message("user", _QUESTION), Message("assistant", _ANSWER)), has_documents=True
        )
        text = "".join(text for text, _ in pieces)
        asked = "".join(text for text, _ in self._layout.question(_QUESTION, (), has_documents=True))
        before = text.partition(_ANSWER)[0]
        return before.removeprefix(asked) if before.startswith(asked) else ""

    def answer_end(self) -> str:
        """The token that ends an answer where the template writes one, else nothing."""
        after = self._after_answer("")
        return self._eos if self._eos and after is not None and after.startswith(self._eos) else ""

    def _after_answer(self, question: str) -> str | None:
        """What the template writes from the end of an answer to the beginning of the next; None where it
        drops earlier answers.
        """
        history = (Message("user", _QUESTION), Message("assistant", _ANSWER))
        pieces = self._layout.question(question, history, has_documents=True)
        places = [place for place, (text, _) in enumerate(pieces) if _ANSWER in text]
        return self._text(pieces[places[0] + 1 :]) if len(places) == 1 else None

    def _text(self, pieces: Sequence[Piece]) -> str:
        return "".join(text if trusted else self._harmless(text) for text, trusted in pieces)

    def _harmless(self, text: str) -> str:
        """Special tokens in what users and documents say, broken apart, so that they stay words to the model."""
        if self._specials is None:
            return text
        return self._specials.sub(lambda found: found[0][0] + _BREAK + found[0][1:], text)
