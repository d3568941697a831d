"""Calls of tools in an answer: SGLang's parsers of them, and the grammars by which a model must write them.

SGLang chooses the parser by the model's chat template, or by ``tool_call_parser`` of ``engine_args``. Parsers
run in the event loop over what the model writes, and a client may have it write anything: those of which some
text takes more than linear time are not served (`PARSERS`)."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)

PARSERS = frozenset(
    {
        *("qwen", "qwen25", "hermes", "mistral", "llama3"),
    }
)
MAX_CALL_CHARS = 2**15  # of an answer from its first call on; what is longer stays text
_FED_SHARE = 32  # a growing call is parsed again when it is longer by one of so many parts
_MOST_STEPS = 256  # results that a parser gives for one piece of text

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of a call. The first of each call has its ``id`` and ``name``."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


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
        from ragserve.engine.compat import prepare

        prepare()
        from sglang.srt.parser.template_detection import detect_tool_call_parser

        if named in (None, "auto"):
            named = detect_tool_call_parser(tokenizer.chat_template, tokenizer)
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

        if choice == "auto" and schema is not None:
            return {"structural_tag": json.dumps(self._calls_or(tools, schema, parallel=parallel))}
        found = self._parser(tools).get_structure_constraint(_choice(choice), parallel_tool_calls=parallel)
        if found is None:
            return {}
        kind, value = found
        whole = value.model_dump(by_alias=True) if hasattr(value, "model_dump") else value
        return {kind: convert_json_schema_to_str(whole)}

    def _calls_or(self, tools: Tools, schema: str, *, parallel: bool) -> dict[str, Any]:
        """A structural tag of calls alone, or of JSON by ``schema``."""
        detector = self._parser(tools).detector
        native = detector.get_structural_tag(_tools(tools), "required", parallel_tool_calls=parallel)
        if native is not None:
            calls = native.model_dump()["format"]
        elif detector.supports_structural_tag():
            calls = self._tags(detector.structure_info(), tools, parallel=parallel)
        else:
            raise ValueError(f"calls as {self.parser} writes them cannot stand beside a response_format")
        answer = {"type": "json_schema", "json_schema": json.loads(schema)}
        return {"type": "structural_tag", "format": {"type": "or", "elements": [answer, calls]}}

    def _tags(self, info: Callable[[str], Any], tools: Tools, *, parallel: bool) -> dict[str, Any]:
        tags = []
        for tool in tools:
            function = tool["function"]
            form, strict = info(function["name"]), function.get("strict")
            content = {"type": "json_schema", "json_schema": (strict and function.get("parameters")) or {}}
            tags.append({"type": "tag", "begin": form.begin, "content": content, "end": form.end})
        return {
            "type": "tags_with_separator",
            "tags": tags,
            "separator": "\n",
            "at_least_one": True,
            "stop_after_first": not parallel,
        }

    def reader(self, tools: Tools, choice: str, earlier: int = 0) -> CallReader:
        """A reader of one answer. ``earlier``: calls of the dialogue before it, which some names count."""
        parser = self._parser(tools)
        detector = parser.detector
        if choice != "auto" and not (
            detector.supports_structural_tag() or detector.parses_required_natively()
        ):
            from sglang.srt.function_call.json_array_parser import JsonArrayParser

            detector = JsonArrayParser()
        return CallReader(detector, _tools(tools), lambda name, index: self._id(name, earlier + index))

    def _id(self, name: str, number: int) -> str:
        """Name a call: nine letters and digits, which the strictest templates take, or as the model does."""
        if self.parser == "kimi_k2":
            return f"functions.{name}:{number}"
        return f"{name}:{number}" if self.parser == "kimi_k3" else uuid.uuid4().hex[:9]

    def _parser(self, tools: Tools) -> Any:
        from sglang.srt.function_call.function_call_parser import FunctionCallParser

        return FunctionCallParser(_tools(tools), self.parser, tokenizer=self._tokenizer)


class CallReader:
    """Splits an answer into text and calls while it comes. What it has not returned as either at the end, as
    calls that cannot be read, it returns as text."""

    def __init__(self, detector: Any, tools: Sequence[Any], name: Callable[[str, int], str]) -> None:
        self._detector, self._tools, self._name = detector, tools, name
        self._whole = ""
        self._fed = 0  # characters of it that the parser has
        self._text = ""  # returned as text
        self._began: int | None = None  # characters that the parser had before the first call
        self._broken = False
        self._given: list[str] = []  # arguments of each call that have been returned

    @property
    def calls(self) -> int:
        """Calls that have begun."""
        return len(self._given)

    def feed(self, text: str) -> Iterator[str | CallDelta]:
        """Yield what is certain after ``text``."""
        self._whole += text
        if self._broken:
            yield from self._plain()
            return
        begun = self._fed if self._began is None else self._began
        if len(self._whole) - self._fed > (self._fed - begun) // _FED_SHARE:
            yield from self._parsed()

    def end(self) -> Iterator[str | CallDelta]:
        """Yield what is left."""
        if not self._broken:
            yield from self._parsed()
        if not self._broken and self._given:
            yield from self._rest_of_arguments()
        elif not self._given:
            self._broken = True
        yield from self._plain()

    def _plain(self) -> Iterator[str]:
        """What has been returned in no form, where no call has been made."""
        if not self._given and self._whole.startswith(self._text):
            rest, self._text = self._whole[len(self._text) :], self._whole
            if rest:
                yield rest

    def _parsed(self) -> Iterator[str | CallDelta]:
        new, self._fed = self._whole[self._fed :], len(self._whole)
        if self._began is not None and self._fed - self._began > MAX_CALL_CHARS:
            self._broken = True
            return
        for _ in range(_MOST_STEPS):
            try:
                found = self._detector.parse_streaming_increment(new, self._tools)
            except Exception as error:  # noqa: BLE001 - parsers raise whatever their text makes them
                log.warning("calls of tools cannot be read: %s", type(error).__name__)
                self._broken = True
                return
            new = ""
            if found.normal_text:
                self._text += found.normal_text
                yield found.normal_text
            yield from filter(None, map(self._delta, found.calls))
            if not found.normal_text and not found.calls:
                break
        held = len(getattr(self._detector, "_buffer", None) or "")
        if self._began is None and held:
            self._began = self._fed - held
        elif not self._given and not held:
            self._began = None

    def _delta(self, call: Any) -> CallDelta | None:
        index = max(0, call.tool_index)
        if call.name:
            index = len(self._given)
            self._given.append(call.parameters)
            return CallDelta(index, call.parameters, self._name(call.name, index), call.name)
        if not self._given:
            return None
        index = min(index, len(self._given) - 1)
        self._given[index] += call.parameters
        return CallDelta(index, call.parameters)

    def _rest_of_arguments(self) -> Iterator[CallDelta]:
        """Arguments of the last call that the parser has read but not returned: they came with the end."""
        read = getattr(self._detector, "prev_tool_call_arr", None) or [{}]
        last = read[-1].get("arguments") if isinstance(read[-1], dict) else None
        whole = last if isinstance(last, str) else json.dumps(last or {}, ensure_ascii=False)
        given = self._given[-1]
        if len(read) == len(self._given) and last is not None and whole.startswith(given) and whole != given:
            self._given[-1] = whole
            yield CallDelta(len(self._given) - 1, whole[len(given) :])


def _tools(tools: Tools) -> list[Any]:
    from sglang.srt.entrypoints.openai.protocol import Tool

    return [Tool.model_validate(tool) for tool in tools]


def _choice(choice: str) -> Any:
    if choice in ("auto", "required"):
        return choice
    from sglang.srt.entrypoints.openai.protocol import ToolChoice, ToolChoiceFuncName

    return ToolChoice(function=ToolChoiceFuncName(name=choice))
