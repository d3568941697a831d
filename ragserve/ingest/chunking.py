"""Documents to chunks of at most ``limit`` tokens of the serving model, losslessly.

chonkie's RecursiveChunker proposes the cuts (paragraphs, sentences, clauses, words); its counts are sums over
pieces, and BPE counts are not additive, so every proposal is counted again and what is still too long is
split here at token boundaries. The result always holds:

* ``text[chunk.start:chunk.end] == chunk.text``, chunks are in order, and together they are the text;
* ``count(chunk.text) == chunk.n_tokens <= limit``, except for a single character that alone is more tokens
  than that;
* a chunk is joined with the next one on its page where both fit into one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from ragserve.ingest.tokenizer import Counter
from ragserve_index.types import NewChunk

__all__ = ["CHUNKING_VERSION", "Chunker"]

CHUNKING_VERSION = 1
"""Part of every content hash: raise it when the same text gives other chunks."""

# characters handed to chonkie at once: it holds a level's pieces in memory and caches their counts
_SECTION = 200_000


class Chunker:
    """Not thread-safe. ``limit`` is in tokens of ``count``."""

    def __init__(self, count: Counter, limit: int) -> None:
        from chonkie import RecursiveChunker, RecursiveLevel, RecursiveRules

        self._count = count
        self._limit = limit
        rules = RecursiveRules()
        # without its last level, which cuts through tokens and decodes them: that loses characters of several
        # tokens
        levels = [level for level in rules.levels or [] if level.delimiters or level.whitespace]
        self._chonkie: Any = RecursiveChunker(
            tokenizer=count,
            chunk_size=limit,
            rules=RecursiveRules([RecursiveLevel(**_fields(level)) for level in levels]),
        )

    def split(self, text: str, pages: Sequence[tuple[int, int]] = ()) -> list[NewChunk]:
        """The chunks of ``text``; none for an empty text or one of white space. ``pages``: (offset, number),
        see `parsers.Parsed`.

        No chunk crosses a page boundary.
        """
        if not text.strip():
            return []
        starts = [start for start, _ in pages]
        bounds = [0, *(start for start in starts if start > 0), len(text)]
        pieces = [
            piece
            for start, end in pairwise(bounds)
            for piece in self._joined(text, list(self._pieces(text, start, end)))
        ]
        counts = self._count.counts([text[start:end] for start, end in pieces])
        return [
            NewChunk(
                text[start:end],
                start,
                end,
                n,
                pages[max(0, bisect_right(starts, start) - 1)][1] if pages else None,
            )
            for (start, end), n in zip(pieces, counts, strict=True)
        ]

    def _pieces(self, text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Spans within [start, end), each at most the limit."""
        while start < end:
            stop = _section_end(text, start, end)
            section = text[start:stop]
            lengths = self._proposed(section)
            for length, n in zip(lengths, self._count.counts(_cut(section, lengths)), strict=True):
                if n <= self._limit:
                    yield start, start + length
                else:
                    yield from self._by_tokens(text, start, start + length)
                start += length

    def _proposed(self, section: str) -> list[int]:
        """chonkie's cuts as lengths; the section whole where its pieces are not the section."""
        try:
            pieces = [chunk.text for chunk in self._chonkie.chunk(section) if chunk.text]
        finally:
            self._chonkie._estimate_token_count.cache_clear()  # an lru_cache of whole texts
        return [len(piece) for piece in pieces] if "".join(pieces) == section else [len(section)]

    def _by_tokens(self, text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Cut text without natural breaks: as many whole tokens as fit, at a word where one ends in the last
        quarter.
        """
        window = self._limit * 8  # characters looked at; more tokens than the limit in nearly every text
        while start < end:
            stop = min(end, start + window)
            spans = self._count.offsets(text[start:stop])
            if len(spans) <= self._limit and (stop == end or stop - start >= window):
                cut = stop
            else:
                cut = start + max(1, spans[self._limit][0] if len(spans) > self._limit else stop - start)
                cut = _at_word(text, start, cut)
            while (
                cut - start > 1 and self._count(text[start:cut]) > self._limit
            ):  # a cut can change the tokens before it
                cut -= max(1, (cut - start) // 16)
            yield start, cut
            start = cut

    def _joined(self, text: str, pieces: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Join neighbours that fit into one chunk: chonkie leaves the rest of a long paragraph, or a heading,
        as a chunk of its own.
        """
        joined: list[tuple[int, int]] = []
        for start, end in pieces:
            if joined and self._count(text[joined[-1][0] : end]) <= self._limit:
                joined[-1] = (joined[-1][0], end)
            else:
                joined.append((start, end))
        return joined


def _fields(level: Any) -> dict[str, Any]:
    return {
        "delimiters": level.delimiters,
        "whitespace": level.whitespace,
        "include_delim": level.include_delim,
    }


def _cut(text: str, lengths: Sequence[int]) -> list[str]:
    out, at = [], 0
    for length in lengths:
        out.append(text[at : at + length])
        at += length
    return out


def _section_end(text: str, start: int, end: int) -> int:
    """At most ``_SECTION`` characters on, after a line break where there is one in the second half."""
    stop = start + _SECTION
    if stop >= end:
        return end
    newline = text.rfind("\n", start + _SECTION // 2, stop)
    return newline + 1 if newline > 0 else stop


def _at_word(text: str, start: int, cut: int) -> int:
    """``cut``, or the place after the last white space of the quarter before it."""
    for at in range(cut, start + (cut - start) * 3 // 4, -1):
        if text[at - 1].isspace():
            return at
    return cut
