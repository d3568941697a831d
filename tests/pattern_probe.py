"""Run regular expressions over hostile texts and say which take too much CPU time: a program of its own,
because `re` keeps the GIL, cannot be stopped, and may never end. Standard library only, to start fast.

Reads ``[[name, pattern or its bytes as a list, flags], ...]`` as JSON from its input. Ends at the
first operation that is slow, the last line of its output; the kernel ends it if that never returns."""

from __future__ import annotations

import json
import re
import resource
import sys
from collections import deque
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from math import ceil
from re import _constants as ops  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from time import process_time, thread_time
from typing import Any

SIZE = 65_536  # characters
LIMIT_S = 0.5  # of CPU; an operation in linear time takes up to 0.05 s
# Smaller texts are tried first. What takes LIMIT_S for SIZE, and grows with the square of the size, takes a
# 16th for a quarter: an operation that takes less than half of that is not tried on larger ones.
SIZES = (SIZE // 16, SIZE // 4, SIZE)
_LONG = 16  # characters of a unit: of longer ones a small text has too few
_OWN = 8  # words of a pattern
_BLANKS = (" ", "\n", "\t", "\r\n", " \n")
_UNITS = (
    *"\"'`«“„‘()[]<>|.-_=#\u3000",
    *("«»", '""', "()", "[]", "[1] ", "<a ", "<!--", "-->", "<!-- -->", "<!-- -->\n"),
    *("```\n", "---\n", "| |\n", "1", "a", "é", "漢", "a1", "1.", "a'", "a=", "a ", "1 "),
    *("x\n", ". ", "://", "\ud800", "\x00", "\xad"),
)


def texts(pattern: str | bytes, flags: int) -> Iterator[tuple[str, Callable[[int], str], int]]:
    """Texts with what they are, by their size in characters, and the length of the unit that they repeat:
    runs of blanks and marks, also between words or behind an opening, and runs of the pattern's own words,
    alone and before blanks."""
    words = list(dict.fromkeys(_words(parser.parse(pattern, flags & ~re.DEBUG))))
    heads = list(dict.fromkeys("".join(words[:n]) for n in range(1, len(words) + 1)))
    own = list(dict.fromkeys((*words, *heads)))[:_OWN]
    for unit in (*_BLANKS, *_UNITS, *own):
        yield repr(unit), partial(_run, unit), len(unit)
    for unit in (*_BLANKS, '"', "«", "'", "`", *own):
        yield f"'x' {unit!r} 'x'", partial(_between, "x", unit, "x"), len(unit)
    for start in dict.fromkeys(("1", "#", "<!--", "x\n", *own)):
        for unit in (" ", "\n", "a", "1", ".", "<!-- -->"):
            yield f"{start!r} {unit!r}", partial(_between, start, unit, "\x01"), len(unit)
    for start in own:
        for unit in (" ", "a", "1", " " * 200):
            yield f"{start + unit!r}", partial(_run, start + unit), len(start + unit)


@lru_cache(256)
def _run(unit: str, size: int) -> str:
    return (unit * (size // len(unit) + 1))[:size]


def _between(start: str, unit: str, end: str, size: int) -> str:
    return start + _run(unit, size)[: -len(start + end)] + end


def _words(parsed: Any) -> Iterator[str]:
    """The literal runs of a pattern, with a character for each class between them that has few."""
    run = ""
    for op, value in parsed:
        if op is ops.LITERAL:
            run += chr(value)
            continue
        if run:
            yield run
            run = ""
        if op is ops.IN:
            yield from (chr(one) for kind, one in value[:4] if kind is ops.LITERAL)
        elif op in (ops.MAX_REPEAT, ops.MIN_REPEAT, ops.POSSESSIVE_REPEAT):
            yield from _words(value[2])
        elif op is ops.SUBPATTERN:
            yield from _words(value[3])
        elif op is ops.ATOMIC_GROUP:
            yield from _words(value)
        elif op is ops.BRANCH:
            for branch in value[1]:
                yield from _words(branch)
        elif op in (ops.ASSERT, ops.ASSERT_NOT):
            yield from _words(value[1])
    if run:
        yield run


_OPERATIONS: dict[str, Callable[[re.Pattern[Any], Any], object]] = {
    "finditer": lambda pattern, text: deque(pattern.finditer(text), maxlen=0),
    "fullmatch": lambda pattern, text: pattern.fullmatch(text),
    "match": lambda pattern, text: pattern.match(text),
    "search": lambda pattern, text: pattern.search(text),
    "sub": lambda pattern, text: pattern.sub(text[:0], text),
}
_WORST = ("finditer", "fullmatch")  # search and sub are parts of the first, match is one of the second


def main() -> None:
    for name, source, flags in json.load(sys.stdin):
        pattern = re.compile(bytes(source) if isinstance(source, list) else source, flags)
        for n, (what, text, unit) in enumerate(texts(pattern.pattern, flags)):
            for operation in _OPERATIONS if n < len(_BLANKS) else _WORST:
                for size in (SIZE,) if unit > _LONG else SIZES:
                    own: Any = text(size)
                    if isinstance(source, list):
                        own = own.encode("utf-8", "replace")
                    taken = _seconds(f"{name}.{operation} over {what}", operation, pattern, own)
                    if taken > LIMIT_S:
                        sys.exit(1)
                    if taken < LIMIT_S / 2 * (size / SIZE) ** 2:
                        break


def _seconds(what: str, operation: str, pattern: re.Pattern[Any], text: Any) -> float:
    """CPU seconds of an operation. It is announced, and its process ends if it takes for ever."""
    stop = ceil(process_time() + LIMIT_S)
    resource.setrlimit(resource.RLIMIT_CPU, (stop, resource.RLIM_INFINITY))
    print(what, flush=True)
    start = thread_time()
    _OPERATIONS[operation](pattern, text)
    return thread_time() - start


if __name__ == "__main__":
    main()
