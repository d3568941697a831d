"""Every regular expression of the server takes linear time, whatever a client sends: `re` keeps the GIL, so a
quadratic one stops all requests. CPU time counts, in a process of its own, and what is slow must be slow each
time: a busy machine fails nothing, nor does one that counts what was stolen from it."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from tests import pattern_probe
from tests.unit.test_structure import modules

# built at run time from others' words: an example of each
BUILT = {
    "ragserve.answering.chat_template": ["(<\\|im_start\\|>|<s>)"],
    "ragserve.answering.messages": ["(<\\|im_start\\|>|<s>)|[\ue000\ue001]"],
    "ragserve.ingest.parsers.delimited": ['"(?:(?!,)\\s)*+(?=,|$)'],
}
Probe = tuple[str, str | list[int], int]


def calls(path: Path) -> Iterator[ast.Call]:
    """The calls of `re` in functions; those of a module or a class leave patterns in their attributes."""
    for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            for node in ast.walk(function):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Attribute)
                    and isinstance(node.func.value, ast.Name)
                    and node.func.value.id == "re"
                    and node.func.attr not in ("escape", "purge")
                ):
                    yield node


USERS = {
    name: path
    for room in ("ragserve", "ragserve_index", "sglang_ext")
    for name, path in modules(room)
    if re.search(r"^import re$", path.read_text(encoding="utf-8"), re.M)
}


def patterns_of(name: str) -> list[Probe]:
    """The module's own patterns: of its attributes, its classes' attributes, and its functions."""
    module = import_module(name)
    places = {name: vars(module)} | {
        f"{name}.{each.__name__}": vars(each)
        for each in vars(module).values()
        if isinstance(each, type) and each.__module__ == name
    }
    found: list[Probe] = [
        (f"{place}.{attribute}", as_json(value.pattern), value.flags)
        for place, attributes in places.items()
        for attribute, value in attributes.items()
        if isinstance(value, re.Pattern)
    ]
    for call in calls(USERS[name]):
        first, flags = call.args[0], 0
        if isinstance(first, ast.Constant):
            for argument in (*call.args[1:], *(keyword.value for keyword in call.keywords)):
                if "re." in ast.unparse(argument):
                    flags = int(eval(ast.unparse(argument), {"re": re}))
            found.append((f"{name}:{call.lineno}", as_json(first.value), flags))
        else:
            assert name in BUILT, f"{name}:{call.lineno} builds a pattern: add an example to BUILT"
    return found + [(f"{name} built", text, 0) for text in BUILT.get(name, [])]


def as_json(pattern: str | bytes) -> str | list[int]:
    return list(pattern) if isinstance(pattern, bytes) else pattern


def slow(probes: list[Probe]) -> str:
    """The first operation that takes more than linear time, and its text; empty if there is none."""
    ran = subprocess.run(
        [sys.executable, "-I", "-S", pattern_probe.__file__],
        input=json.dumps(probes),
        capture_output=True,
        text=True,
        check=False,
    )
    assert not ran.stderr, ran.stderr
    return ran.stdout.splitlines()[-1] if ran.returncode else ""


@pytest.mark.parametrize("name", USERS)
def test_patterns_take_linear_time(name: str) -> None:
    probes = patterns_of(name)
    said = [slow(probes)]
    while said[-1] and len(said) < 3:
        said.append(slow(probes))
    assert said[-1] == "", said


@pytest.mark.parametrize(
    "pattern",
    [
        r"\s*\[\d{1,3}\]",
        "«[^»]*»",
        r"\A(<!--.*?-->\s*)*<html",
        "<b[^>]+charset=",
        r"(\S.*?) *\r?\n=",
        "[^.]+[.]",
    ],
)
def test_the_probe_finds_what_is_not_linear(pattern: str) -> None:
    assert slow([("it", pattern, re.S)])
