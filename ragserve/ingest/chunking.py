"""Cut documents into chunks of at most ``limit`` tokens of the serving model, losslessly.

chonkie's RecursiveChunker proposes cuts at paragraphs, sentences, clauses and words. It adds up the counts of
pieces, but BPE counts are not additive, so every proposal is counted again, and pieces that are still too
long are split here at token boundaries. The result always satisfies:

* ``text[chunk.start:chunk.end] == chunk.text``; chunks are in order, and joined they are the text;
* ``count(chunk.text) == chunk.n_tokens <= limit``, except for a single character of more tokens than that;
* a chunk is joined with the next one on its page if both fit into one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

from ragserve.ingest.tokenizer import Counter
from ragserve_index.types import NewChunk

CHUNKING_VERSION = 1
"""Part of every content hash. Raise it when a change here gives other chunks for the same text."""

# characters given to chonkie at once: it holds the pieces of a level in memory and caches their counts
_SECTION = 200_000


class Chunker:
    """Cuts texts into chunks of at most ``limit`` tokens of ``count``. Not thread-safe."""

    def __init__(self, count: Counter, limit: int) -> None:
        from chonkie import RecursiveChunker, RecursiveRules

        self._count = count
        self._limit = limit
        rules = RecursiveRules()
        # without the last level, which decodes slices of tokens and so loses characters of several tokens
        levels = [level for level in rules.levels or [] if level.delimiters or level.whitespace]
        self._chonkie: Any = RecursiveChunker(tokenizer=count, chunk_size=limit, rules=RecursiveRules(levels))

    def split(self, text: str, pages: Sequence[tuple[int, int]] = ()) -> list[NewChunk]:
        """Cut ``text`` into chunks; a text of white space has none.

        No chunk crosses a page boundary. ``pages`` holds (offset, number), see `parsers.Parsed`.
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
        chunks = []
        for (start, end), n_tokens in zip(pieces, counts, strict=True):
            page = pages[max(0, bisect_right(starts, start) - 1)][1] if pages else None
            chunks.append(NewChunk(text[start:end], start, end, n_tokens, page))
        return chunks

    def _pieces(self, text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield spans of [start, end), each within the limit."""
        while start < end:
            stop = _section_end(text, start, end)
            section = text[start:stop]
            lengths = self._proposed(section)
            ends = list(accumulate(lengths))
            pieces = [section[end - length : end] for end, length in zip(ends, lengths, strict=True)]
            for length, n in zip(lengths, self._count.counts(pieces), strict=True):
                if n <= self._limit:
                    yield start, start + length
                else:
                    yield from self._by_tokens(text, start, start + length)
                start += length

    def _proposed(self, section: str) -> list[int]:
        """Lengths of chonkie's pieces, or of the whole section if the pieces do not add up to it."""
        try:
            pieces = [chunk.text for chunk in self._chonkie.chunk(section) if chunk.text]
        finally:
            self._chonkie._estimate_token_count.cache_clear()  # an lru_cache of whole texts
        return [len(piece) for piece in pieces] if "".join(pieces) == section else [len(section)]

    def _by_tokens(self, text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Cut text without natural breaks: as many tokens as fit, to the end of a word if it is near."""
        window = self._limit * 8  # characters; nearly every text has more than the limit's tokens in it
        while start < end:
            stop = min(end, start + window)
            spans = self._count.offsets(text[start:stop])
            if len(spans) <= self._limit and (stop == end or stop - start >= window):
                cut = stop
            else:
                cut = start + max(1, spans[self._limit][0] if len(spans) > self._limit else stop - start)
                cut = _at_word(text, start, cut)
            # a cut can change the tokens before it
            while cut - start > 1 and self._count(text[start:cut]) > self._limit:
                cut -= max(1, (cut - start) // 16)
            yield start, cut
            start = cut

    def _joined(self, text: str, pieces: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Join neighbours that fit into one chunk.

        chonkie makes a heading, or the rest of a long paragraph, a chunk of its own.
        """
        joined: list[tuple[int, int]] = []
        for start, end in pieces:
            if joined and self._count(text[joined[-1][0] : end]) <= self._limit:
                joined[-1] = (joined[-1][0], end)
            else:
                joined.append((start, end))
        return joined


def _section_end(text: str, start: int, end: int) -> int:
    """End of the section at ``start``: ``_SECTION`` characters on, or a line break in its second half."""
    stop = start + _SECTION
    if stop >= end:
        return end
    newline = text.rfind("\n", start + _SECTION // 2, stop)
    return newline + 1 if newline > 0 else stop


def _at_word(text: str, start: int, cut: int) -> int:
    """``cut``, moved back behind the last white space in the quarter before it, if there is one."""
    for at in range(cut, start + (cut - start) * 3 // 4, -1):
        if text[at - 1].isspace():
            return at
    return cut
