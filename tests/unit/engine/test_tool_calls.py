"""Calls of tools in what models write: read by SGLang's parsers however the text is cut, in linear time."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ragserve.engine.compat import prepare
from ragserve.engine.grammars import check_constraint, check_schema
from ragserve.engine.tool_calls import MAX_CALL_CHARS, MAX_CALLS, PARSERS, ToolCall, ToolFormat

prepare()
ARGUMENTS = {"city": "Oslo", "days": 3}
LISTS = {"places": [["Oslo", 1], ["Bergen", 2]]}


def tool(name: str, strict: bool = False) -> dict[str, Any]:
    properties = {"city": {"type": "string"}, "days": {"type": "integer"}, "places": {"type": "array"}}
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}


TOOLS = [tool("get_weather"), tool("add")]


def as_json(name: str, arguments: Any, key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments})


SAID = {
    "hermes": f"Let me look [1].<tool_call>{as_json('get_weather', ARGUMENTS)}</tool_call>\n"
    f"<tool_call>\n{as_json('add', LISTS)}\n</tool_call>",
    "qwen": f"Let me look [1].\n<tool_call>\n{as_json('get_weather', ARGUMENTS)}\n</tool_call>\n"
    f"<tool_call>\n{as_json('add', LISTS)}\n</tool_call>",
    "mistral": f"[TOOL_CALLS] [{as_json('get_weather', ARGUMENTS)}, {as_json('add', LISTS)}]",
    "llama3": f"<|python_tag|>{as_json('get_weather', ARGUMENTS, 'parameters')};{as_json('add', LISTS)}",
    "deepseekv3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    f"{json.dumps(ARGUMENTS)}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
    f"{json.dumps(LISTS)}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseekv31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
    f"{json.dumps(ARGUMENTS)}<｜tool▁call▁end｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>"
    f"{json.dumps(LISTS)}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
    f"<|tool_call_argument_begin|>{json.dumps(ARGUMENTS)}<|tool_call_end|><|tool_call_begin|>functions.add:1"
    f"<|tool_call_argument_begin|>{json.dumps(LISTS)}<|tool_call_end|><|tool_calls_section_end|>",
    "qwen3_coder": "Let me look [1].\n<tool_call>\n<function=get_weather>\n"
    "<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=add>\n"
    f"<parameter=places>\n{json.dumps(LISTS['places'])}\n</parameter>\n</function>\n</tool_call>",
    "glm": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>add\n"
    f"<arg_key>places</arg_key>\n<arg_value>{json.dumps(LISTS['places'])}</arg_value>\n</tool_call>",
    "glm47": "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value>"
    "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call><tool_call>add"
    f"<arg_key>places</arg_key><arg_value>{json.dumps(LISTS['places'])}</arg_value></tool_call>",
}
ALIASES = {"qwen25": "qwen", "glm45": "glm"}


def read(parser: str, text: str, step: int, choice: str = "auto") -> tuple[str, list[ToolCall]]:
    reader = ToolFormat(parser, None).reader(TOOLS, choice)
    parts: list[Any] = [
        part for at in range(0, len(text), step) for part in reader.feed(text[at : at + step])
    ]
    parts += reader.end()
    calls = [part for part in parts if isinstance(part, ToolCall)]
    return "".join(part for part in parts if isinstance(part, str)), calls


WEATHER = json.dumps({"name": "get_weather", "arguments": ARGUMENTS}, indent=2)
ADD = as_json("add", LISTS | {"note": 'braces } and "quotes" in a text'})


@pytest.mark.parametrize("parser", ["hermes", "qwen", "qwen25"])
@pytest.mark.parametrize(
    ("text", "names", "left"),
    [
        (f"```json\n{WEATHER}\n```", ["get_weather"], ""),
        (f"```\n{WEATHER}\n```\n", ["get_weather"], ""),
        (f"\n```tool_call\n{ADD}\n```\nI call it [1].", ["add"], "I call it [1]."),
        (WEATHER, ["get_weather"], ""),
        (f"```json\n{WEATHER}\n{ADD}\n```", ["get_weather", "add"], ""),
        (f"```json\n{WEATHER}\n```\n\n```json\n{ADD}\n```", ["get_weather", "add"], ""),
        (f"{WEATHER}\n<tool_call>\n{ADD}\n</tool_call>", ["get_weather", "add"], ""),
    ],
)
def test_a_call_without_marks_is_read(parser: str, text: str, names: list[str], left: str) -> None:
    """Qwen2.5-Coder writes them so."""
    for step in (1, 2, 3, 7, 50, len(text)):
        said, calls = read(parser, text, step)
        assert [call.name for call in calls] == names, step
        assert said.strip() == left
        arguments = {"get_weather": ARGUMENTS, "add": json.loads(ADD)["arguments"]}
        assert all(json.loads(call.arguments) == arguments[call.name] for call in calls)


@pytest.mark.parametrize(
    "text",
    [
        f"Like this: ```json\n{WEATHER}\n```",
        f"```json\n{as_json('Alan Stevenson', {})}\n```",
        f"```json\n{as_json('get_weather', [1])}\n```",
        f"```json\n{as_json('get_weather', ARGUMENTS)[:-4]}",
        '```json\n{"name": "get_weather", "arguments": {a}}\n```',
        f"```python\nprint({WEATHER})\n```",
        '{"name": "Oslo"}',
        '{"answer": "Oslo [1]"}',
        "```\nls\n```",
        "{",
        "`",
        " \n",
    ],
)
def test_other_json_stays_text(text: str) -> None:
    for step in (1, 2, 3, 7, 50, len(text)):
        assert read("qwen", text, step) == (text, [])


def test_json_that_begins_otherwise_is_streamed_at_once() -> None:
    for text in ('{"answer"', "```python", "Oslo", "```json\n[", '```json\n{"city"'):
        reader = ToolFormat("qwen", None).reader(TOOLS, "auto")
        assert "".join(map(str, reader.feed(text))) == text
    schema = ToolFormat("qwen", None).reader(TOOLS, "auto", may_fence=False)
    assert "".join(map(str, schema.feed(WEATHER))) == WEATHER, "asked for as response_format"


@pytest.mark.parametrize("parser", sorted(PARSERS))
def test_calls_are_read_however_the_text_is_cut(parser: str) -> None:
    text = SAID[ALIASES.get(parser, parser)]
    for step in (1, 2, 3, 7, 50, len(text)):
        said, calls = read(parser, text, step)
        assert [(call.name, json.loads(call.arguments)) for call in calls] == [
            ("get_weather", ARGUMENTS),
            ("add", LISTS),
        ], step
        assert said.strip() == ("Let me look [1]." if text.startswith("Let") else ""), step
        assert len({call.id for call in calls}) == len(calls)
        assert all(call.id for call in calls)


@pytest.mark.parametrize("parser", sorted(PARSERS))
@pytest.mark.parametrize(
    "text", ["", "Alan Stevenson [1].", "a <tool", "2 < 3 [TOOL", "<｜tool", "A {1} and [2, 3]", "<|", "\n "]
)
def test_a_text_without_calls_is_left_as_it_is(parser: str, text: str) -> None:
    for step in (1, 3, 100):
        assert read(parser, text, step) == (text, [])


@pytest.mark.parametrize("parser", ["hermes", "qwen", "llama3", "mistral"])
def test_what_cannot_be_read_as_a_call_is_text(parser: str) -> None:
    unknown = SAID[parser].replace("get_weather", "x").replace('"add"', '"y"')
    assert read(parser, unknown, 5) == (unknown, [])
    cut = SAID[parser][:-20]
    said, calls = read(parser, cut, 5)
    assert said.rstrip().endswith(cut.rstrip()[-8:])
    assert len(calls) < len(TOOLS)


def test_a_grammars_array_of_calls_is_read() -> None:
    text = json.dumps([{"name": "add", "parameters": LISTS}, {"name": "add", "parameters": {}}])
    said, calls = read("glm", text, 4, choice="required")
    assert said == ""
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("add", LISTS), ("add", {})]


def hostile(parser: str) -> Iterator[str]:
    detector = ToolFormat(parser, None)._parser(TOOLS).detector
    begin = detector.bot_token or detector.tool_call_start_token
    end = detector.eot_token or getattr(detector, "tool_call_end_token", "")
    for head in ("", begin, begin * (MAX_CALLS - 1), begin + '{"name": "add", "arguments": {"a": ['):
        for unit in (
            "a",
            " ",
            "\n",
            "{",
            "[",
            "<",
            '"',
            "'a': ",
            "}, {",
            '{"name":',
            "</",
            begin,
            end or ".",
            end + "\n{}",
        ):
            yield (head + unit * MAX_CALL_CHARS)[: MAX_CALL_CHARS + 100]


@pytest.mark.parametrize("parser", sorted(PARSERS - ALIASES.keys()))
def test_no_text_takes_a_parser_long(parser: str) -> None:
    for text in hostile(parser):
        began = time.thread_time()
        read(parser, text, 1024)
        assert time.thread_time() - began < 1.0, (text[:80], text[-40:])


@pytest.mark.parametrize("parser", sorted(PARSERS))
@pytest.mark.parametrize("choice", ["required", "get_weather"])
def test_a_model_can_be_made_to_call(parser: str, choice: str) -> None:
    form = ToolFormat(parser, None)
    tools = [tool("get_weather", strict=True)]
    constraint = form.constraint(tools, choice, parallel=False)
    check_constraint(constraint)
    assert "get_weather" in next(iter(constraint.values()))
    assert form.constraint([tool("get_weather")], "auto", parallel=True) == {}


ONE = check_schema({"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]})


@pytest.fixture(scope="module")
def accepts(model_path: Path) -> Callable[[dict[str, str], str], bool]:
    """Whether an answer that ends there keeps to a constraint, as SGLang compiles it."""
    from transformers import AutoTokenizer
    from xgrammar import GrammarCompiler, GrammarMatcher, TokenizerInfo

    tokenizer = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
    compiler = GrammarCompiler(TokenizerInfo.from_huggingface(tokenizer))

    def accepted(constraint: dict[str, str], text: str) -> bool:
        ((kind, grammar),) = constraint.items()
        compiled = (
            compiler.compile_json_schema(grammar, any_whitespace=False)
            if kind == "json_schema"
            else compiler.compile_structural_tag(grammar)
        )
        matcher = GrammarMatcher(compiled)
        return matcher.accept_string(text) and matcher.accept_token(tokenizer.eos_token_id)

    return accepted


@pytest.mark.parametrize("parser", ["hermes", "qwen", "mistral", "llama3", "deepseekv3", "deepseekv31"])
def test_the_grammar_takes_calls_and_nothing_else(
    parser: str, accepts: Callable[[dict[str, str], str], bool]
) -> None:
    form, tools = ToolFormat(parser, None), [tool("get_weather", strict=True), tool("add")]
    tags = form.constraint(tools, "required", parallel=True)["structural_tag"]
    marks = {each["begin"]: each["end"] for each in json.loads(tags)["format"]["tags"]}

    def call(name: str, arguments: Any) -> str:
        begin = next(each for each in marks if name in each)
        return f"{begin}{json.dumps(arguments)}{marks[begin]}"

    one, other = call("get_weather", ARGUMENTS), call("add", {"any": [1]})
    for choice in ("required", "get_weather"):
        offered = tools if choice == "required" else tools[:1]
        alone = form.constraint(offered, choice, parallel=False)
        assert accepts(alone, one)
        assert accepts(alone, other) == (choice == "required")
        assert not any(
            accepts(alone, text)
            for text in (
                "",
                "Oslo",
                f"{one}.",
                f"{one}\n{one}",
                call("get_weather", {"days": "x"}),
                one.replace("Oslo", "Oslo  ").replace('  "', '"  '),
            )
        )
    several = form.constraint(tools, "required", parallel=True)
    assert accepts(several, f"{one}\n{other}") == (parser != "llama3")
    either = form.constraint(tools, "auto", parallel=False, schema=ONE)
    assert accepts(either, one)
    assert accepts(either, '{"a": 1}')
    assert not accepts(either, '{"a": 2}')
    assert [read(parser, text, 3)[1][0].name for text in (one, other)] == ["get_weather", "add"]


@pytest.mark.parametrize("parser", sorted(PARSERS))
def test_text_alone_begins_no_call(parser: str, accepts: Callable[[dict[str, str], str], bool]) -> None:
    constraint = ToolFormat(parser, None).no_calls()
    check_constraint(constraint)
    assert accepts(constraint, "It is at 06:40 [1].\n\n<b>Tide</b>, [2] and {3}.")
    assert not accepts(constraint, SAID[ALIASES.get(parser, parser)])


def test_many_tools_are_within_the_limits_of_grammars() -> None:
    tools = [tool(f"tool{i}", strict=True) for i in range(128)]
    check_constraint(ToolFormat("hermes", None).constraint(tools, "required", parallel=True))


def test_json_or_calls() -> None:
    constraint = ToolFormat("hermes", None).constraint(
        TOOLS, "auto", parallel=True, schema=check_schema({"type": "object"})
    )
    check_constraint(constraint)
    elements = json.loads(constraint["structural_tag"])["format"]["elements"]
    assert [each["type"] for each in elements] == ["grammar", "tags_with_separator"]
    with pytest.raises(ValueError, match="cannot stand beside a response_format"):
        ToolFormat("glm", None).constraint(TOOLS, "auto", parallel=True, schema='{"type": "object"}')


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        ("{{ '<tool_call>\\n{\"name\": ' }}", "qwen"),
        ("{{ '<tool_call>' + call | tojson }}", "hermes"),
        ("{{ '<|python_tag|>' }}", "llama3"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("{{ '<function=' }}{{ '<parameter=' }}<tool_call>", "qwen3_coder"),
        ("{% if enable_thinking is defined and enable_thinking is false %}{% endif %}", "qwen"),
        ("{{ messages }}", None),
    ],
)
def test_the_parser_is_that_of_the_template(template: str, parser: str | None) -> None:
    tokenizer = SimpleNamespace(chat_template=template, get_vocab=dict)
    found = ToolFormat.of(tokenizer)
    assert (found and found.parser) == parser
    named = ToolFormat.of(tokenizer, "gpt-oss")
    assert named is not None
    assert not named.is_served
