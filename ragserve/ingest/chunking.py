"""Cut documents into chunks of at most ``limit`` tokens of the serving model, losslessly.

chonkie's RecursiveChunker proposes cuts at paragraphs, sentences, clauses and words. It adds up the counts of
pieces, but BPE counts are not additive, so every proposal is counted again, and pieces that are still too
long are split here at token boundaries. Tables are cut between their rows; a chunk that continues a table
begins with a copy of its header, unless that would take more than half of a chunk. A sentence that goes on
over the end of a page is whole in the chunk of the next page, which begins with a copy of the sentence's
beginning. The result satisfies:

* ``chunk.text`` is the header's copy, mostly empty, and ``text[chunk.start:chunk.end]``: the length of the
  copy is ``chunk.header_chars``. Chunks are in order, and without the copies they are the text;
* ``count(chunk.text) == chunk.n_tokens <= limit``, except for a single character of more tokens than that;
* a chunk is joined with the next one on its page if both fit into one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from ragserve.ingest.graphemes import grapheme_start
from ragserve.ingest.markdown_tables import TableSpan, tables_in
from ragserve.ingest.page_seams import sentence_end, sentences_over_pages
from ragserve.ingest.parsers.base import GivenCut
from ragserve.ingest.tokenizer import Counter
from ragserve_index.types import NewChunk
from sglang_ext.wire.sentence_ends import ALONE

CHUNKING_VERSION = 4
"""Part of every content hash. Raise it when a change here gives other chunks for the same text."""

# characters given to chonkie at once: it holds the pieces of a level in memory and caches their counts
_SECTION = 200_000
_CLAUSES = "\uff0c\u3001\uff1b\uff1a\u060c\u061b\u104a\u0f0d"  # ，、；： and Arabic, Burmese, Tibetan ones
_ROWS = 1000  # of a table, counted at once


class _Piece(NamedTuple):
    """A span of the text, and the header of the table, or the beginning of the sentence, that it
    continues."""

    start: int
    end: int
    header: str = ""

    def text(self, document: str) -> str:
        return self.header + document[self.start : self.end]


class Chunker:
    """Cuts texts into chunks of at most ``limit`` tokens of ``count``. Not thread-safe."""

    def __init__(self, count: Counter, limit: int) -> None:
        from chonkie import RecursiveChunker, RecursiveRules

        self._count = count
        self._limit = limit
        rules = RecursiveRules()
        # without the last level, which decodes slices of tokens and so loses characters of several tokens
        levels = [level for level in rules.levels or [] if level.delimiters or level.whitespace]
        # chonkie's own are those of scripts with spaces: paragraphs, sentences, clauses, words
        for level, more in ((levels[1], ALONE), (levels[2], _CLAUSES)):
            level.delimiters = [*level.delimiters, *more]
        self._chonkie: Any = RecursiveChunker(tokenizer=count, chunk_size=limit, rules=RecursiveRules(levels))

    def split(
        self, text: str, pages: Sequence[tuple[int, int]] = (), *, running: bool = False
    ) -> list[NewChunk]:
        """Cut ``text`` into chunks; a text of white space has none.

        No chunk crosses a page boundary. ``pages`` holds (offset, number), see `parsers.Parsed`. ``running``:
        the text goes on from page to page, as it does in a book and not on slides.
        """
        if not text.strip():
            return []
        starts = [start for start, _ in pages]
        bounds = [0, *(start for start in starts if start > 0), len(text)]
        leads = dict(sentences_over_pages(text, pages)) if running else {}
        pieces = [
            piece
            for start, end in pairwise(bounds)
            for piece in self._joined(text, self._led(text, start, end, leads.get(start, "")))
        ]
        counts = self._count.counts([piece.text(text) for piece in pieces])
        chunks = []
        for piece, n_tokens in zip(pieces, counts, strict=True):
            page = pages[max(0, bisect_right(starts, piece.start) - 1)][1] if pages else None
            chunks.append(NewChunk(piece.text(text), piece.start, piece.end, n_tokens, page))
        return chunks

    def given(self, text: str, cuts: Sequence[GivenCut]) -> list[NewChunk]:
        """The chunks of a text that came in chunks, those of more than ``limit`` tokens, too."""
        counts = self._count.counts([text[cut.start : cut.end] for cut in cuts])
        return [
            NewChunk(text[cut.start : cut.end], cut.start, cut.end, n_tokens, cut.page)
            for cut, n_tokens in zip(cuts, counts, strict=True)
        ]

    def _pieces(self, text: str, start: int, end: int) -> Iterator[_Piece]:
        """Yield spans of [start, end), each within the limit."""
        for table in tables_in(text, start, end):
            yield from self._prose(text, start, table.start)
            yield from self._table(text, table)
            start = table.end
        yield from self._prose(text, start, end)

    def _led(self, text: str, start: int, end: int, lead: str) -> Iterator[_Piece]:
        """Yield the spans of a page, the first with the beginning of its sentence."""
        pieces = self._pieces(text, start, end)
        first = next(pieces, None) if lead else None
        if first is not None:
            whole = first._replace(header=lead)
            sentence = whole._replace(end=min(first.end, sentence_end(text, start, first.end)))
            if first.header or self._count(sentence.text(text)) > self._limit:
                yield first
            elif self._count(whole.text(text)) <= self._limit:
                yield whole
            else:
                yield sentence
                yield first._replace(start=sentence.end)
        yield from pieces

    def _prose(self, text: str, start: int, end: int) -> Iterator[_Piece]:
        while start < end:
            stop = _section_end(text, start, end)
            section = text[start:stop]
            lengths = self._proposed(section)
            ends = list(accumulate(lengths))
            pieces = [section[end - length : end] for end, length in zip(ends, lengths, strict=True)]
            for length, n in zip(lengths, self._count.counts(pieces), strict=True):
                if n <= self._limit:
                    yield _Piece(start, start + length)
                else:
                    yield from self._by_tokens(text, _Piece(start, start + length))
                start += length

    def _table(self, text: str, table: TableSpan) -> Iterator[_Piece]:
        """Yield runs of whole rows, the first with the header, the others with a copy of it."""
        header = text[table.start : table.rows]
        n_header = self._count(header)
        again = header if n_header <= self._limit // 2 else ""
        run, used = _Piece(table.start, table.rows), n_header
        for start, end, n in self._rows(text, table.rows, table.end):
            if used + n > self._limit:
                yield from self._fitting(text, run)
                run, used = _Piece(start, start, again), n_header if again else 0
            run, used = run._replace(end=end), used + n
        yield from self._fitting(text, run)

    def _rows(self, text: str, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield the offsets of each line and its tokens."""
        while start < end:
            ends: list[int] = []
            at = start
            while at < end and len(ends) < _ROWS:
                at = text.find("\n", at, end) + 1 or end
                ends.append(at)
            spans = list(pairwise([start, *ends]))
            for span, n in zip(spans, self._count.counts([text[a:b] for a, b in spans]), strict=True):
                yield *span, n
            start = at

    def _fitting(self, text: str, piece: _Piece) -> Iterator[_Piece]:
        """Yield the piece, or its parts if it is over the limit."""
        if self._count(piece.text(text)) <= self._limit:
            yield piece
        else:
            yield from self._by_tokens(text, piece)

    def _proposed(self, section: str) -> list[int]:
        """Lengths of chonkie's pieces, or of the whole section if the pieces do not add up to it."""
        try:
            pieces = [chunk.text for chunk in self._chonkie.chunk(section) if chunk.text]
        finally:
            self._chonkie._estimate_token_count.cache_clear()  # an lru_cache of whole texts
        return [len(piece) for piece in pieces] if "".join(pieces) == section else [len(section)]

    def _by_tokens(self, text: str, piece: _Piece) -> Iterator[_Piece]:
        """Cut text without natural breaks: as many tokens as fit, to the end of a word if it is near."""
        start, end, header = piece
        limit = self._limit - (self._count(header) if header else 0)
        window = limit * 8  # characters; nearly every text has more than the limit's tokens in it
        while start < end:
            stop = min(end, start + window)
            spans = self._count.offsets(text[start:stop])
            if len(spans) <= limit and (stop == end or stop - start >= window):
                cut = stop
            else:
                cut = start + max(1, spans[limit][0] if len(spans) > limit else stop - start)
                cut = _at_word(text, start, cut)
            # a cut can change the tokens before it
            while cut - start > 1 and self._count(header + text[start:cut]) > self._limit:
                cut -= max(1, (cut - start) // 16)
            whole = grapheme_start(text, cut)
            cut = whole if whole > start else cut
            yield _Piece(start, cut, header)
            start = cut

    def _joined(self, text: str, pieces: Iterable[_Piece]) -> list[_Piece]:
        """Join neighbours that fit into one chunk.

        chonkie makes a heading, or the rest of a long paragraph, a chunk of its own.
        """
        joined: list[_Piece] = []
        for piece in pieces:
            if joined:
                # its header, if it has one, is that of the piece before it: they are of one table
                both = joined[-1]._replace(end=piece.end)
                if self._count(both.text(text)) <= self._limit:
                    joined[-1] = both
                    continue
            joined.append(piece)
        return joined


def _section_end(text: str, start: int, end: int) -> int:
    """End of the section at ``start``: ``_SECTION`` characters on, or a line break in its second half."""
    stop = start + _SECTION
    if stop >= end:
        return end
    newline = text.rfind("\n", start + _SECTION // 2, stop)
    return newline + 1 if newline > 0 else grapheme_start(text, stop)


def _at_word(text: str, start: int, cut: int) -> int:
    """``cut``, moved back behind the last white space in the quarter before it, if there is one."""
    for at in range(cut, start + (cut - start) * 3 // 4, -1):
        if text[at - 1].isspace():
            return at
    return cut
