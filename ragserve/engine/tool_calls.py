"""Calls of tools in an answer: SGLang's parsers of them, and the grammars by which a model must write them.

SGLang chooses the parser by the model's chat template, or by ``tool_call_parser`` of ``engine_args``. Parsers
run in the event loop over what the model writes, and a client may have it write anything: those are served
that take no more than linear time, and read the calls of their models' documentation (`PARSERS`)."""

from __future__ import annotations

import json
import logging
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ragserve.engine.fenced_calls import FencedCalls

log = logging.getLogger(__name__)

PARSERS = frozenset(
    {
        *("deepseekv3", "deepseekv31", "glm", "glm45", "glm47", "hermes", "kimi_k2", "llama3", "mistral"),
        *("qwen", "qwen25", "qwen3_coder"),
    }
)
MAX_CALL_CHARS = 2**17  # of an answer from its first call on; what is longer stays text
MAX_CALLS = 128  # marks of calls in one answer; parsers look for the end of each
_ANY_OBJECT = {"type": "object"}
_FENCED = frozenset({"hermes", "qwen", "qwen25"})  # whose calls are JSON with the tool's name first
_MOST_WRITTEN = 32  # tools whose grammars are written out
_MOST_FAILED = 16  # ends of calls at which none was found; then only the answer's end is one

Tools = Sequence[Mapping[str, Any]]
"""Tools as OpenAI's API has them."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool; ``arguments`` are JSON, as the model wrote them."""

    id: str
    name: str
    arguments: str


class ToolFormat:
    """How one model writes calls.

    Args:
        parser: SGLang's name of it.
        tokenizer: The model's.
    """

    def __init__(self, parser: str, tokenizer: Any) -> None:
        self.parser = parser
        self._tokenizer = tokenizer

    @classmethod
    def of(cls, tokenizer: Any, named: str | None = None) -> ToolFormat | None:
        """The format that the template of ``tokenizer`` asks for; None if SGLang knows none. ``named``: the
        operator's choice, or ``auto``. Imports SGLang, which takes seconds where it has not been."""
        if named in (None, "auto"):
            named = _detected(tokenizer)
        return None if named is None else cls(named, tokenizer)

    @property
    def is_served(self) -> bool:
        return self.parser in PARSERS

    def constraint(
        self, tools: Tools, choice: str, *, parallel: bool, schema: str | None = None
    ) -> dict[str, str]:
        """Sampling parameters by which an answer keeps to the form of calls.

        Args:
            tools: As OpenAI has them.
            choice: ``auto``, ``required``, or the name of a tool.
            parallel: Several calls may be made.
            schema: A JSON schema that an answer without calls keeps to.

        Raises ValueError where the parser has no such grammar."""
        from sglang.utils import convert_json_schema_to_str

        parser, calls = self._parser(tools), None
        if choice != "auto" or schema is not None:
            calls = self._calls(parser, tools, choice, parallel=parallel)
        if choice == "auto" and schema is not None:
            if calls is None:
                raise ValueError(f"calls as {self.parser} writes them cannot stand beside a response_format")
            calls = {"type": "or", "elements": [_json(json.loads(schema)), calls]}
        if calls is not None:
            return {"structural_tag": json.dumps({"type": "structural_tag", "format": calls})}
        found = parser.get_structure_constraint(_choice(choice), parallel_tool_calls=parallel)
        if found is None:
            return {}
        kind, value = found
        if kind == "full_assistant_ebnf":  # 0.5.23's for whole answers of some models: no sampling parameter
            return {}
        whole = value.model_dump(by_alias=True) if hasattr(value, "model_dump") else value
        return {kind: convert_json_schema_to_str(whole)}

    def _calls(self, parser: Any, tools: Tools, choice: str, *, parallel: bool) -> dict[str, Any] | None:
        """The format of a structural tag of calls and nothing else; None if the parser has none."""
        detector = parser.detector
        asked = _choice("required" if choice == "auto" else choice)
        native = detector.get_structural_tag(parser.tools, asked, parallel_tool_calls=parallel)
        if native is not None:
            calls = dict(native.model_dump()["format"])
            if "stop_after_first" in calls:
                calls["stop_after_first"] = not parallel
            return calls
        if not detector.supports_structural_tag():
            return None
        return self._tags(detector, tools, parallel=parallel)

    def _tags(self, detector: Any, tools: Tools, *, parallel: bool) -> dict[str, Any]:
        form, tags = detector.structure_info(), []
        for tool in tools:
            function = tool["function"]
            call, strict = form(function["name"]), function.get("strict")
            schema = (strict and function.get("parameters")) or _ANY_OBJECT
            many = len(tools) > _MOST_WRITTEN  # a grammar is longer than its schema
            content = {"type": "json_schema", "json_schema": schema} if many else _json(schema)
            begin, end = call.begin, call.end
            if detector.bot_token.strip() not in begin:  # a mark around all calls, which the parser wants
                begin, end = detector.bot_token + begin, end + detector.eot_token
            tags.append({"type": "tag", "begin": begin, "content": content, "end": end})
        return {
            "type": "tags_with_separator",
            "tags": tags,
            "separator": "\n",
            "at_least_one": True,
            "stop_after_first": not parallel or self.parser == "llama3",  # which reads no second mark
        }

    def no_calls(self) -> dict[str, str]:
        """Sampling parameters by which an answer is text, of a model that has made calls before and may make
        none now; empty where calls have no mark."""
        begin, _ = _marks(self._parser(()).detector)
        if not begin:
            return {}
        text = {"type": "any_text", "excludes": [begin[:-1]]}  # some models vary the mark
        return {"structural_tag": json.dumps({"type": "structural_tag", "format": text})}

    def reader(self, tools: Tools, choice: str, earlier: int = 0, *, may_fence: bool = True) -> CallReader:
        """A reader of one answer. ``earlier``: calls of the dialogue before it, which some names count.
        ``may_fence``: JSON with which the answer begins may be a call, too."""
        parser = self._parser(tools)
        detector = parser.detector
        as_array = choice != "auto" and not (
            detector.supports_structural_tag() or detector.parses_required_natively()
        )
        begin, end = _marks(detector)
        fenced = None
        if may_fence and choice == "auto" and self.parser in _FENCED:
            names = {tool["function"]["name"] for tool in tools}
            fenced = FencedCalls(names, begin=begin, end=end, most=MAX_CALL_CHARS)
        return CallReader(
            _array if as_array else parser.parse_non_stream,
            lambda name, index: self._id(name, earlier + index),
            begin="" if as_array else begin,
            end=end,
            bare=self.parser == "llama3",
            fenced=fenced,
        )

    def _id(self, name: str, number: int) -> str:
        """Name a call: nine letters and digits, which the strictest templates take, or as the model does."""
        if self.parser == "kimi_k2":
            return f"functions.{name}:{number}"
        return uuid.uuid4().hex[:9]

    def _parser(self, tools: Tools) -> Any:
        from sglang.srt.entrypoints.openai.protocol import Tool
        from sglang.srt.function_call.function_call_parser import FunctionCallParser

        checked = [Tool.model_validate(tool) for tool in tools]
        return FunctionCallParser(checked, self.parser, tokenizer=self._tokenizer)


class CallReader:
    """Splits an answer into text and calls while it comes. A call is returned when it is complete; what
    cannot be read as one is text.

    Args:
        parse: Returns text and calls of the answer from its first call on.
        name: Makes the id of a call of its name and number.
        begin: What calls begin with; empty if the whole answer is calls.
        end: What ends them; empty if they end with the answer.
        bare: A call may also be an answer that begins with a brace.
        fenced: Reads calls without marks; None where there are none.
    """

    def __init__(
        self,
        parse: Callable[[str], tuple[str, Sequence[Any]]],
        name: Callable[[str, int], str],
        *,
        begin: str,
        end: str,
        bare: bool,
        fenced: FencedCalls | None = None,
    ) -> None:
        self._fenced = fenced
        self._parse, self._name, self._begin, self._end, self._bare = parse, name, begin, end, bare
        self._held = ""
        self._in_call = not begin
        self._looked = 0  # characters of what is held in which no end was found
        self._is_first = True  # nothing but blanks has come
        self._begun = self._made = 0  # calls
        self._failed = 0  # texts in which no call was found

    def feed(self, text: str) -> Iterator[str | ToolCall]:
        """Yield what is certain after ``text``."""
        yield from self._feed(text if self._fenced is None else self._fenced.feed(text))

    def _feed(self, text: str) -> Iterator[str | ToolCall]:
        self._held += text
        while True:
            if not self._in_call:
                yield from self._text()
            if not self._in_call:
                return
            at = self._held.find(self._end, self._looked) if self._end else -1
            if at < 0:
                self._looked = max(0, len(self._held) - len(self._end) + 1)
                break
            self._looked = at + len(self._end)
            if self._failed < _MOST_FAILED:
                yield from self._calls(self._looked)
        if len(self._held) > MAX_CALL_CHARS:
            yield from self._as_text()

    def end(self) -> Iterator[str | ToolCall]:
        """Yield what is left."""
        if self._fenced is not None:
            yield from self._feed(self._fenced.end())
        if self._in_call:
            yield from self._calls(len(self._held))
        yield from self._as_text()

    def _text(self) -> Iterator[str]:
        """Yield text up to what may begin a call."""
        held = self._held
        if self._bare and self._is_first and not held.strip():
            return
        begins = self._bare and self._is_first and held.lstrip().startswith("{")
        at = 0 if begins else held.find(self._begin)
        self._in_call = at >= 0
        if self._in_call:
            self._looked = 0
            self._begun += 1
        else:
            most = min(len(held), len(self._begin) - 1)
            at = len(held) - next((n for n in range(most, 0, -1) if self._begin.startswith(held[-n:])), 0)
        self._is_first = False
        if at:
            yield held[:at]
        self._held = held[at:]

    def _calls(self, until: int) -> Iterator[str | ToolCall]:
        """Yield the calls of what is held up to a place; nothing while there are none."""
        held = self._held[:until]
        if self._begin and self._begun + held.count(self._begin) > MAX_CALLS:
            self._failed = _MOST_FAILED
            return
        try:
            text, calls = self._parse(held)
        except Exception as error:  # noqa: BLE001 - parsers raise whatever their text makes them
            log.warning("calls of tools cannot be read: %s", type(error).__name__)
            calls = ()
        if not calls:
            self._failed += 1
            return
        self._held, self._in_call, self._looked = self._held[until:], not self._begin, 0
        if text.strip():
            yield text
        for call in calls:
            yield ToolCall(self._name(call.name, self._made), call.name, call.parameters)
            self._made += 1

    def _as_text(self) -> Iterator[str]:
        held, self._held, self._in_call, self._looked = self._held, "", not self._begin, 0
        if held:
            yield held


@dataclass(frozen=True, slots=True)
class _Called:
    name: str
    parameters: str


def _marks(detector: Any) -> tuple[str, str]:
    """What calls begin and end with; empty where there is nothing."""
    begin = detector.bot_token or getattr(detector, "tool_call_start_token", "")
    end = detector.eot_token or getattr(detector, "tool_call_end_token", "")
    return begin.strip().removesuffix(" ["), end.strip()


def _array(text: str) -> tuple[str, list[_Called]]:
    """The calls of an answer that a grammar has made an array of them."""
    return "", [
        _Called(str(call["name"]), json.dumps(call["parameters"], ensure_ascii=False))
        for call in json.loads(text)
    ]


def _json(schema: Mapping[str, Any]) -> dict[str, str]:
    """The part of a structural tag that is JSON without free white space, which some models write for ever:
    with a schema in place of its grammar there is no such choice."""
    from xgrammar import Grammar

    grammar = Grammar.from_json_schema(json.dumps(schema), any_whitespace=False)
    return {"type": "grammar", "grammar": str(grammar)}


def _detected(tokenizer: Any) -> str | None:
    """SGLang's choice, by rules for the newer models; else by the marks of the older ones."""
    from ragserve.engine.compat import prepare

    prepare()
    from sglang.srt.parser.template_detection import detect_reasoning_pattern, detect_tool_call_parser

    template = str(tokenizer.chat_template)
    forced, reasoning = detect_reasoning_pattern(template)
    found = detect_tool_call_parser(template, tokenizer, reasoning, forced)
    if found is None and "<tool_call>" in template:
        return "qwen" if re.search(r"<tool_call>(\\n|\n)\{", template) else "hermes"
    older = {"<|python_tag|>": "llama3", "[TOOL_CALLS]": "mistral"}
    return found or next((parser for mark, parser in older.items() if mark in template), None)


def _choice(choice: str) -> Any:
    if choice in ("auto", "required"):
        return choice
    from sglang.srt.entrypoints.openai.protocol import ToolChoice, ToolChoiceFuncName

    return ToolChoice(function=ToolChoiceFuncName(name=choice))
