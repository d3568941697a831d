"""HTML: the main text found by trafilatura or, if there is little, all text that a browser would show."""

from __future__ import annotations

import re
from typing import Any

from ragserve.errors import UnsupportedDocument
from ragserve.ingest.markdown_tables import markdown_table
from ragserve.ingest.parsers.base import Parsed, Raw, unreadable
from ragserve.ingest.parsers.charset import Decoded, decode

# in an XML declaration, or in a meta element
_CHARSET = re.compile(
    rb"\A\s*+<\?xml[^<>]{1,99}?encoding\s*+=\s*+[\"']([A-Za-z0-9_.:-]+)"
    rb"|<meta[^<>]+charset\s*+=\s*+[\"']?\s*+([A-Za-z0-9_.:-]+)",
    re.I,
)
_ROW_END = re.compile(r"^(\|.*\|) +$", re.M)  # of a table, as trafilatura writes it
_INVISIBLE = {"script", "style", "noscript", "template", "head", "svg", "iframe", "object"}
_BLOCK_TAGS = (
    "address article aside blockquote br caption dd details dialog div dl dt fieldset figcaption figure "
    "footer form h1 h2 h3 h4 h5 h6 header hr li main nav ol p pre section summary table td th tr ul"
)
_BLOCKS = frozenset(_BLOCK_TAGS.split())
# characters; below that, trafilatura has often taken a caption or a cookie notice for the article
_MIN_MAIN_TEXT = 200


def parse(raw: Raw) -> Parsed:
    source, note = decode_page(raw.data, raw.charset)
    tree = _tree(source)
    title, text = _main_text(_with_header_rows(tree, source), raw.url)
    everything = _all_text(tree)
    if len(text) < _MIN_MAIN_TEXT and len(everything) > len(text):
        text = everything
    return Parsed(text, "text/html", title=title or _heading(tree, ".//title", ".//h1"), note=note)


def decode_page(data: bytes, charset: str | None = None) -> Decoded:
    """Decode a page by ``charset``, else by what the page says itself. Raises ``UnsupportedDocument``."""
    found = None if charset else _CHARSET.search(data[:4096])
    return decode(data, (found.group(1) or found.group(2)).decode("ascii") if found else charset)


def heading_and_text(source: str) -> tuple[str, str]:
    """The first heading, or the title, and all visible text of a page that is a part of a document."""
    try:
        tree = _tree(source)
    except UnsupportedDocument:  # nothing is in it
        return "", ""
    return _heading(tree, ".//h1", ".//h2", ".//h3", ".//title"), _all_text(tree)


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


def _with_header_rows(tree: Any, source: str) -> str:
    """The source with a header row in each table of data, without which trafilatura does not write it as
    Markdown. Changes the tree."""
    from lxml import html as lxml_html

    changed = False
    for table in tree.iter("table"):
        if table.find(".//th") is None and _rows(table):
            changed = True
            for cell in next(table.iter("tr")).iterchildren("td"):
                cell.tag = "th"
    return lxml_html.tostring(tree, encoding="unicode") if changed else source


def _main_text(source: str, url: str | None) -> tuple[str, str]:
    import trafilatura

    # Only the title of the metadata is read. A thorough search for dates would compile the expressions of 200
    # languages, three seconds in every parsing process.
    found = trafilatura.bare_extraction(
        source,
        url=url,
        include_comments=False,
        include_formatting=False,
        with_metadata=True,
        date_extraction_params={"extensive_search": False},
    )
    if found is None:
        return "", ""
    return (found.title or "").strip(), _ROW_END.sub(r"\1", found.text or "").strip()


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
            if node.tag == "table" and (rows := _rows(node)):
                parts.append(f"{_heading(node, 'caption')}\n{markdown_table(rows)}\n")
                continue
            parts.append(node.text or "")
            stack.extend((child, False) for child in reversed(node))
    lines = (" ".join(line.split()) for line in "".join(parts).split("\n"))
    return "\n".join(line for line in lines if line)


def _rows(table: Any) -> list[list[str]]:
    """The texts of the cells of a table of data; empty for one that arranges a page."""
    if table.find(".//table") is not None:
        return []
    rows = [[_all_text(cell) for cell in row.iterchildren("td", "th")] for row in table.iter("tr")]
    rows = [row for row in rows if any(row)]
    return rows if len(rows) > 1 and max(map(len, rows)) > 1 else []
