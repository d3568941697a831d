"""HTML: the main text found by trafilatura or, if there is little, all text that a browser would show."""

from __future__ import annotations

import re
from copy import deepcopy
from typing import Any, NamedTuple

from ragserve.errors import UnsupportedDocument
from ragserve.ingest.markdown_tables import markdown_table
from ragserve.ingest.parsers.base import Parsed, Raw, joined_notes, left_out, unreadable
from ragserve.ingest.parsers.charset import Decoded, decode
from ragserve.ingest.parsers.html_hidden import drop_hidden
from ragserve.ingest.parsers.html_marks import write_marks
from ragserve.ingest.parsers.html_tables import cells_of, lay_out_tables

# in an XML declaration, or in a meta element
_CHARSET = re.compile(
    rb"\A\s*+<\?xml[^<>]{1,99}?encoding\s*+=\s*+[\"']([A-Za-z0-9_.:-]+)"
    rb"|<meta[^<>]+charset\s*+=\s*+[\"']?\s*+([A-Za-z0-9_.:-]+)",
    re.I,
)
_ROW_END = re.compile(r"^(\|.*\|) +$", re.M)  # of a table, as trafilatura writes it
_LIST_NUMBER = re.compile(r"^- (?=(?:-?\d{1,9}|[a-zA-Z]|[ivxIVX]{1,8})\. )", re.M)  # as `write_marks` has it
# a row before the header of another table, which would be one more row without a blank line
_BETWEEN_TABLES = re.compile(r"(?<=\|\n)(?=\|[^\n]*+(?<=\|)\n\|(?:---\|)++$)", re.M)
_TABLE = re.compile(r"^\|(?:---\|)++$", re.M)
_INVISIBLE = {"script", "style", "noscript", "template", "head", "svg", "iframe", "object"}
_BLOCK_TAGS = (
    "address article aside blockquote br caption dd details dialog div dl dt fieldset figcaption figure "
    "footer form h1 h2 h3 h4 h5 h6 header hr legend li main nav ol optgroup option p pre section select "
    "summary table td textarea th tr ul"
)
_BLOCKS = frozenset(_BLOCK_TAGS.split())
# characters; below that, trafilatura has often taken a caption or a cookie notice for the article
_MIN_MAIN_TEXT = 200


def parse(raw: Raw) -> Parsed:
    source, note = decode_page(raw.data, raw.charset)
    tree, n_hidden = _shown(source, keep=raw.hidden)
    heading, everything = _heading(tree, ".//title", ".//h1"), _all_text(tree)
    title, text = _main_text(tree, raw.url)
    # trafilatura ends lines at inline elements, and writes signs before items
    if len(text) < _MIN_MAIN_TEXT and sum(map(str.isalnum, everything)) >= sum(map(str.isalnum, text)):
        text = everything
    note = joined_notes(note, hidden_note(0 if raw.hidden else n_hidden))
    text = _BETWEEN_TABLES.sub("\n", text)
    return Parsed(text, "text/html", title=title or heading, note=note)


def decode_page(data: bytes, charset: str | None = None) -> Decoded:
    """Decode a page by ``charset``, else by what the page says itself. Raises ``UnsupportedDocument``."""
    found = None if charset else _CHARSET.search(data[:4096])
    return decode(data, (found.group(1) or found.group(2)).decode("ascii") if found else charset)


class PagePart(NamedTuple):
    """A page that is a part of a document: its heading, all visible text, and how many passages of it no
    reader sees."""

    heading: str = ""
    text: str = ""
    n_hidden: int = 0


def part(source: str, *, hidden: bool = False, scripts: bool = True) -> PagePart:
    """Read such a page. ``hidden`` takes the hidden passages too; for ``scripts`` see `drop_hidden`."""
    try:
        tree, n_hidden = _shown(source, keep=hidden, scripts=scripts)
    except UnsupportedDocument:  # nothing is in it
        return PagePart()
    text = _BETWEEN_TABLES.sub("\n", _all_text(tree))
    return PagePart(_heading(tree, ".//h1", ".//h2", ".//h3", ".//title"), text, n_hidden)


def hidden_note(n_hidden: int) -> str:
    """The note about hidden passages of HTML."""
    return left_out({"hidden passages": n_hidden})


def _shown(source: str, *, keep: bool = False, scripts: bool = True) -> tuple[Any, int]:
    """The tree of a page as its reader sees it, and the number of passages that are hidden."""
    tree = _tree(source)
    n_hidden = drop_hidden(tree, keep=keep, scripts=scripts)
    write_marks(tree)
    lay_out_tables(tree, _all_text)
    return tree, n_hidden


def _tree(source: str) -> Any:
    from lxml import etree  # type: ignore[import-untyped]
    from lxml import html as lxml_html

    try:
        # libxml2 rejects an encoding declaration in text that is already decoded
        return lxml_html.document_fromstring(re.sub(r"^\s*<\?xml[^>]*\?>", "", source))
    except (etree.ParserError, etree.XMLSyntaxError, ValueError) as error:
        raise unreadable("corrupt", f"not readable as HTML ({error})") from error


def _heading(tree: Any, *places: str) -> str:
    found = (tree.find(place) for place in places)
    texts = (" ".join("".join(node.itertext()).split()) for node in found if node is not None)
    return next(filter(None, texts), "")


def _main_text(tree: Any, url: str | None) -> tuple[str, str]:
    n_tables = sum(1 for _ in tree.iter("table"))
    # of pages with more tables than paragraphs, trafilatura's second opinion drops the small ones
    spare = deepcopy(tree) if 2 * n_tables > sum(1 for _ in tree.iter("p")) else None
    title, text = _extracted(tree, url)
    if spare is not None and len(_TABLE.findall(text)) < n_tables:
        alone = _extracted(spare, url, fast=True)[1]
        if len(_TABLE.findall(alone)) > len(_TABLE.findall(text)):
            text = alone
    return title, text


def _extracted(tree: Any, url: str | None, *, fast: bool = False) -> tuple[str, str]:
    import trafilatura

    # Only the title of the metadata is read. A thorough search for dates would compile the expressions of 200
    # languages, three seconds in every parsing process.
    found = trafilatura.bare_extraction(
        tree,
        url=url,
        fast=fast,
        include_comments=False,
        include_formatting=False,
        with_metadata=True,
        date_extraction_params={"extensive_search": False},
    )
    if found is None:
        return "", ""
    return (found.title or "").strip(), _LIST_NUMBER.sub("", _ROW_END.sub(r"\1", found.text or "")).strip()


def _all_text(tree: Any) -> str:
    """Return all visible text in document order, with each block on its own line."""
    parts: list[str] = []
    # an explicit stack: a hostile page may nest deeper than Python's recursion limit
    stack: list[tuple[Any, bool]] = [(tree, False)]
    while stack:
        node, leaving = stack.pop()
        visible = isinstance(node.tag, str) and node.tag not in _INVISIBLE
        if leaving:
            if visible and node.tag in _BLOCKS:
                parts.append("\n")
            parts.append(node.tail or "")
            continue
        stack.append((node, True))
        if visible:
            if node.tag in _BLOCKS:
                parts.append("\n")
            if node.tag == "table" and (rows := cells_of(node)):
                parts.append(f"\n{markdown_table(rows)}\n")
                continue
            parts.append(node.text or "")
            stack.extend((child, False) for child in reversed(node))
    lines = (" ".join(line.split()) for line in "".join(parts).split("\n"))
    return "\n".join(line for line in lines if line)
