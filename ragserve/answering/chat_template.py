"""Find the bounds of a prompt's segments in the model's chat template.

Three forms, tried in this order:

* ``documents``: the template takes documents (`documents=`, for retrieval-trained models) and writes each the
  same way.
* ``messages``: the template takes messages only; documents go into the first user message, before the
  question.
* ``plain``: the model has no template; headings and blank lines.

A template is rendered with markers in place of the contents and cut at the markers. Pieces are ``(text,
trusted)``: text of the template or ours is trusted and may hold special tokens; text of users and documents
is not, and is tokenised as plain text."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, Literal

from ragserve.answering.messages import HiddenText, Message, mark, without_tool_turns
from ragserve.engine.tool_calls import Tools

Piece = tuple[str, bool]

DEFAULT_SYSTEM = (
    "Answer the question using only the documents. If they do not hold the answer, say so. "
    "Cite the documents you use as [1], [2], ... in the order in which they are given."
)
_DOCUMENTS = ("Documents:\n\n", True)
_QUESTION = ("Question: ", True)
_ASKED, _ANSWERED, _NEXT = "\ue000asked\ue001", "\ue000answered\ue001", "\ue000next\ue001"
_STOP_TOKENS = 16  # most tokens of a text that ends an answer
_TEXT = 3  # place of the text among the pieces of a document, without a template for documents
_MARK = re.compile("\ue000([a-z]+[0-9]*)\ue001")
_PROBE = {
    "name": mark("tool"),
    "description": mark("about"),
    "parameters": {"type": "object", "properties": {}},
}


class ChatLayout:
    """Lays out a prompt for one tokenizer, as pieces and token ids.

    ``special_tokens`` matches the texts of its special tokens; None if it has none. ``special_ids``: their
    texts by id."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._specials = _special_tokens(tokenizer)
        self.special_ids = {token: text for text, token in self._specials.items()}
        names = sorted(self._specials, key=len, reverse=True)
        self.special_tokens = re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else None
        self.stop: tuple[str, ...] = ()
        self.form: Literal["documents", "messages", "plain"] = "plain"
        self._doc: list[Piece] = []
        if getattr(tokenizer, "chat_template", None):
            self._doc = self._document_form()
            self.form = "documents" if self._doc else "messages"
        else:
            self.stop = ("\n\nQuestion:", "\n### ")

    def head(self, system: str | None, *, has_documents: bool) -> list[Piece]:
        """Lay out everything before the first document (without documents: before the question)."""
        if self.form == "plain":
            return [*self._start_of_text(), (system or DEFAULT_SYSTEM, system is None), ("\n\n", True)]
        question = {"role": "user", "content": mark("question")}
        rendered = self._render(system, [question], has_documents=has_documents)
        head, _ = self._cut(rendered, ["question"], has_documents=has_documents)
        return self._head_pieces(head, {"system": system or ""}, has_documents=has_documents)

    def _head_pieces(self, head: str, contents: dict[str, str], *, has_documents: bool) -> list[Piece]:
        documents = [_DOCUMENTS] if self.form == "messages" and has_documents else []
        return [*self._pieces(head, contents), *documents]

    def _cut(self, rendered: str, names: Iterable[str], *, has_documents: bool) -> tuple[str, str]:
        """Return what is before the documents and what is behind them, or begins with the first mark of the
        messages' ``names``, as their contents do."""
        if self.form == "documents" and has_documents:
            header = self._doc[0][0] if self._doc[0][1] else ""
            trailer = self._doc[-1][0] if self._doc[-1][1] else ""
            end = rendered.index(mark("text0")) + len(mark("text0"))
            return rendered[: rendered.index(mark("title0")) - len(header)], rendered[end + len(trailer) :]
        marks = map(mark, names)  # a template may drop earlier messages
        cut = min(rendered.index(each) for each in marks if each in rendered)
        return rendered[:cut], rendered[cut:]

    def document(self, title: str, text: str) -> list[Piece]:
        """Lay out a document, the same at any place."""
        if self.form == "documents":
            return [
                ({"\ue000title\ue001": title, "\ue000text\ue001": text}.get(piece, piece), trusted)
                for piece, trusted in self._doc
            ]
        return [
            ("### ", True),
            (title or "Document", False),
            ("\n", True),
            (text.strip("\n"), False),
            ("\n\n", True),
        ]

    def token_starts(self, title: str, text: str, characters: Sequence[int]) -> list[int]:
        """The numbers of the tokens, in `document`'s ids, that hold these characters of ``text``.

        Empty for a tokenizer that cannot tell."""
        if not getattr(self._tokenizer, "is_fast", False):
            return []
        pieces = self.document(title, text)
        place = [part for part, _ in self._doc].index(mark("text")) if self.form == "documents" else _TEXT
        before = sum(len(part) for part, _ in pieces[:place])
        shift = 0 if self.form == "documents" else len(text) - len(text.lstrip("\n"))
        ends: list[int] = []  # of each token, in the characters of all pieces
        at = 0
        for part in self._runs(pieces):
            if isinstance(part, int):
                at += len(self._tokenizer.convert_ids_to_tokens(part))
                ends.append(at)
            else:
                found = self._tokenizer(
                    part, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True
                )
                ends += [at + end for _, end in found["offset_mapping"]]
                at += len(part)
        return [min(bisect_right(ends, before + max(0, c - shift)), len(ends) - 1) for c in characters]

    def question(
        self, question: str, history: Sequence[Message], turns: Sequence[Message] = (), *, has_documents: bool
    ) -> list[Piece]:
        """Lay out history, question and the ``turns`` behind it, calls of tools and their results, up to the
        start of the answer."""
        with_turns = turns or any(message.role == "tool" or message.tool_calls for message in history)
        if with_turns and not self.reads_tool_turns:
            history, question = without_tool_turns(history, question, turns)
            turns = ()
        if self.form == "plain":
            pieces: list[Piece] = []
            for m in history:
                label = "Question: " if m.role == "user" else "Answer: "
                pieces += [(label, True), (m.content, False), ("\n\n", True)]
            return [*pieces, _QUESTION, (question, False), ("\n\nAnswer:", True)]
        messages, contents = self._dialogue(question, history, turns)
        rendered = self._render(None, messages, has_documents=has_documents)
        _, rest = self._cut(rendered, contents, has_documents=has_documents)
        heading = [_QUESTION] if self.form == "messages" and has_documents else []
        return [*heading, *self._pieces(rest, contents)]

    def with_tools(
        self,
        system: str | None,
        question: str,
        history: Sequence[Message],
        turns: Sequence[Message],
        tools: Tools,
        *,
        has_documents: bool,
    ) -> tuple[list[Piece], list[Piece]]:
        """Lay out what `head` and `question` do, for a template that is given tools and writes them where it
        likes. Their text is not trusted."""
        messages, contents = self._dialogue(question, history, turns)
        hidden = HiddenText(self.special_tokens, "tool")
        rendered = self._render(system, messages, hidden.of(tools), has_documents=has_documents)
        head, rest = self._cut(rendered, contents, has_documents=has_documents)
        contents |= hidden.contents | {"system": system or ""}
        heading = [_QUESTION] if self.form == "messages" and has_documents else []
        return (
            self._head_pieces(head, contents, has_documents=has_documents),
            [*heading, *self._pieces(rest, contents)],
        )

    def follow_up(self, question: str, *, has_documents: bool) -> tuple[list[Piece], list[Piece]] | None:
        """Lay out the next turn behind an answer: up to its first document, and from the last one to the
        start of the next answer. Without documents all is in the second part.

        None if the template drops earlier answers."""
        dialogue = (Message("user", _ASKED), Message("assistant", _ANSWERED))
        pieces = self.question(_NEXT, dialogue, has_documents=True)
        texts = [text for text, _ in pieces]
        answers = [i for i, text in enumerate(texts) if _ANSWERED in text]
        if len(answers) != 1 or _NEXT not in texts:
            return None
        place = texts.index(_NEXT)
        before, after = pieces[answers[0] + 1 : place], [(question, False), *pieces[place + 1 :]]
        if not has_documents:
            return [], [*before, *after]
        if self.form == "plain":
            return before[:-1], [*before[-1:], *after]
        if self.form == "messages":
            return [*before, _DOCUMENTS], [_QUESTION, *after]
        text = "".join(text for text, _ in before)
        end = self._end_of_turn(text)
        return [(text[:end], True)], [(text[end:], True), *after]

    def _end_of_turn(self, before: str) -> int:
        """The place of documents in the text between two turns, by a template that takes documents. Those
        that a special token begins are no part of a message."""
        header, trusted = self._doc[0]
        if self.special_tokens and trusted and self.special_tokens.match(header):
            ended = self.special_tokens.match(before)
            return ended.end() if ended else 0
        return len(before)

    def encode(self, pieces: Sequence[Piece]) -> list[int]:
        """Token ids of a segment.

        Special tokens count in trusted pieces only; plain runs are tokenised whole."""
        ids: list[int] = []
        for part in self._runs(pieces):
            ids += [part] if isinstance(part, int) else self._plain(part)
        return ids

    def _runs(self, pieces: Sequence[Piece]) -> Iterator[str | int]:
        """Yield plain runs of text, and the ids of special tokens in trusted pieces."""
        run = ""
        for text, trusted in pieces:
            for part in self.special_tokens.split(text) if trusted and self.special_tokens else [text]:
                if trusted and part in self._specials:
                    if run:
                        yield run
                    run = ""
                    yield self._specials[part]
                else:
                    run += part
        if run:
            yield run

    def answer_ids(self, generated: Sequence[int], text: str) -> list[int]:
        """Token ids of an answer as the next turn repeats it: those ``generated``, without what ended it,
        where they say ``text``."""
        end = len(generated)
        while end and self._says(generated[:end]) != text and len(generated) - end < _STOP_TOKENS:
            end -= 1
        while end and self._says(generated[: end - 1]) == text:
            end -= 1
        return list(generated[:end]) if self._says(generated[:end]) == text else self._plain(text)

    def _says(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def _plain(self, text: str) -> list[int]:
        if not text:
            return []
        return list(self._tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids)

    def _start_of_text(self) -> list[Piece]:
        token = getattr(self._tokenizer, "bos_token", None)
        return [(token, True)] if token and getattr(self._tokenizer, "add_bos_token", True) else []

    def _pieces(self, rendered: str, contents: dict[str, str]) -> list[Piece]:
        parts = _MARK.split(rendered)  # text, name, text, name, ..., text
        pieces = [(contents[part] if i % 2 else part, i % 2 == 0) for i, part in enumerate(parts)]
        return [piece for piece in pieces if piece[0]]

    def _dialogue(
        self, question: str, history: Sequence[Message], turns: Sequence[Message]
    ) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """Messages with marks, and what stands behind these."""
        hidden = HiddenText(self.special_tokens)
        messages = [*history, Message("user", question), *turns]
        return [hidden.message(message) for message in messages], hidden.contents

    def _render(
        self,
        system: str | None,
        messages: list[dict[str, Any]],
        tools: Tools = (),
        *,
        has_documents: bool,
    ) -> str:
        """Render the template with messages that have marks. ``system`` None: the template's own text, or
        ours."""
        if system is not None:
            messages = [{"role": "system", "content": mark("system")}, *messages]
        elif self.form == "messages":
            messages = [{"role": "system", "content": DEFAULT_SYSTEM}, *messages]
        return self._apply(messages, _documents(self.form == "documents" and has_documents), tools)

    def _apply(self, messages: list[dict[str, Any]], docs: list[dict[str, str]], tools: Tools = ()) -> str:
        from jinja2 import TemplateError

        try:
            return self._rendered(messages, docs, tools)
        except TemplateError:
            if messages[0]["role"] != "system":
                raise
            # No system role in this template: its text leads the first user message instead.
            first, *rest = messages[1:]
            merged = {"role": first["role"], "content": f"{messages[0]['content']}\n\n{first['content']}"}
            return self._rendered([merged, *rest], docs, tools)

    def _rendered(self, messages: list[dict[str, Any]], docs: list[dict[str, str]], tools: Tools) -> str:
        options: dict[str, Any] = {"documents": docs} if docs else {}
        if tools:
            options["tools"] = list(tools)
        return str(
            self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **options
            )
        )

    @cached_property
    def reads_tool_turns(self) -> bool:
        """The template writes calls of tools and their results."""
        call = {"id": "abcdefghi", "type": "function", "function": {"name": mark("tool"), "arguments": {}}}
        return self._writes(
            [
                {"role": "user", "content": mark("question")},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {
                    "role": "tool",
                    "tool_call_id": "abcdefghi",
                    "name": mark("tool"),
                    "content": mark("result"),
                },
            ],
            ("tool", "result"),
        )

    @cached_property
    def offers_tools(self) -> bool:
        """The template writes tools, also beside documents, and their turns."""
        tools = [{"type": "function", "function": _PROBE}]
        documents = ("title0", "text0") if self.form == "documents" else ()
        asked = [{"role": "user", "content": mark("question")}]
        return self.reads_tool_turns and self._writes(asked, ("tool", "question", *documents), tools)

    def _writes(self, messages: list[dict[str, Any]], names: Iterable[str], tools: Tools = ()) -> bool:
        from jinja2 import TemplateError

        if self.form == "plain":
            return False
        try:
            rendered = self._render(None, messages, tools, has_documents=True)
        except (TemplateError, TypeError, KeyError):
            return False
        return all(mark(name) in rendered for name in names)

    def _document_form(self) -> list[Piece]:
        """Pieces of a document in the template; none if it ignores documents or numbers them, as ids would
        then depend on the place."""
        from jinja2 import TemplateError

        try:
            rendered = [
                self._apply([{"role": "user", "content": mark("question")}], _documents(n)) for n in (1, 3)
            ]
        except (TemplateError, TypeError, KeyError):
            return []
        one, three = rendered
        if mark("text0") not in one or mark("title0") not in one:
            return []
        between = [_between(three, mark(f"text{i}"), mark(f"title{i + 1}")) for i in (0, 1)]
        inner = [_between(three, mark(f"title{i}"), mark(f"text{i}")) for i in (0, 1, 2)]
        if None in between or len(set(between)) != 1 or None in inner or len(set(inner)) != 1:
            return []
        gap, middle = str(between[0]), str(inner[0])
        before, after = one.split(mark("title0"))[0], one.split(mark("text0"), 1)[1]
        trailer = self._common_start(gap, after)
        header = gap[len(trailer) :]
        if not before.endswith(header):
            return []
        return [
            (header, True),
            (mark("title"), False),
            (middle, True),
            (mark("text"), False),
            (trailer, True),
        ]

    def _common_start(self, gap: str, after: str) -> str:
        """The longest common start of two texts that does not split a special token."""
        parts = [
            list(filter(None, self.special_tokens.split(text) if self.special_tokens else [text]))
            for text in (gap, after)
        ]
        common = ""
        for a, b in zip(*parts, strict=False):
            if a != b:
                if a not in self._specials and b not in self._specials:
                    n = next(
                        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
                    )
                    common += a[:n]
                break
            common += a
        return common


def _documents(n: int) -> list[dict[str, str]]:
    return [{"title": mark(f"title{i}"), "text": mark(f"text{i}")} for i in range(n)]


def _between(text: str, left: str, right: str) -> str | None:
    if left not in text or right not in text:
        return None
    start, end = text.index(left) + len(left), text.index(right)
    return text[start:end] if start <= end else None


def _special_tokens(tokenizer: Any) -> dict[str, int]:
    """Text and id of every token that the tokenizer would recognise in running text."""
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    found = {str(token): int(i) for i, token in added.items()}
    found |= dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    return {token: i for token, i in found.items() if token}
