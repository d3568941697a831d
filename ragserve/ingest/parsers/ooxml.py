"""Office Open XML containers: parts found by content types and relationships, and read without validation.

python-docx, openpyxl and python-pptx check what they do not need: a style without a name or a date in another
form makes a file unreadable. They know the transitional namespaces and some types of main parts only.
"""

from __future__ import annotations

import posixpath
import re
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from io import BytesIO
from typing import Any, NamedTuple
from urllib.parse import unquote

from ragserve.ingest.parsers.base import one_line

_MOST_NAMED = 5  # damaged parts in a note
_STRICT = re.compile(rb"http://purl\.oclc\.org/ooxml/(\w+)/")  # ISO 29500 Strict has namespaces of its own
_DRAWING = "{http://schemas.openxmlformats.org/drawingml/2006/main}"
_RELATION = "{http://schemas.openxmlformats.org/officeDocument/2006/relationships}"
_TITLE = "{http://purl.org/dc/elements/1.1/}title"
# what stands around the number of a page
_PAGE_WORDS = frozenset(
    [
        "page",
        "pages",
        "of",
        "p",
        "pg",
        "seite",
        "von",
        "página",
        "pagina",
        "de",
        "di",
        "sur",
        "sida",
        "av",
        "z",
    ]
)
_KINDS = (  # word of a main part's content type, usual folder, parser
    ("wordprocessingml", "ms-word.", "word/document.xml", "docx"),
    ("spreadsheetml", "ms-excel.", "xl/workbook.xml", "xlsx"),
    ("presentationml", "ms-powerpoint.", "ppt/presentation.xml", "pptx"),
)


class Relation(NamedTuple):
    """What a part refers to. ``kind`` is the last word of its type, ``target`` a part, or a URL outside."""

    id: str
    kind: str
    target: str
    external: bool


class Package:
    """The parts of a file. Names of parts are compared without case, and with slashes of either kind.

    Of a part whose XML is damaged, what stands there is read all the same, and ``damage`` says so. Raises
    ``zipfile.BadZipFile``, and ``KeyError`` for parts that are not there.
    """

    def __init__(self, data: bytes) -> None:
        self._zip = zipfile.ZipFile(BytesIO(data))
        self._entries = {_key(entry.filename): entry for entry in self._zip.infolist()}
        self._relations: dict[str, list[Relation]] = {}
        self._damaged: dict[str, None] = {}
        self.size = sum(entry.file_size for entry in self._zip.infolist())

    def __contains__(self, name: str) -> bool:
        return _key(name) in self._entries

    def read(self, name: str) -> bytes:
        """A part's bytes, with the namespaces of transitional files."""
        entry = self._entries.get(_key(name))
        if entry is None:
            raise KeyError(f"there is no part {name}")
        data = self._zip.read(entry)
        if b"purl.oclc.org" not in data:
            return data
        return _STRICT.sub(rb"http://schemas.openxmlformats.org/\1/2006/", data)

    def xml(self, name: str) -> Any:
        """The root element of a part. Raises ``lxml.etree.XMLSyntaxError`` if nothing of it can be read."""
        from lxml import etree  # type: ignore[import-untyped]

        data = self.read(name)
        try:
            return etree.fromstring(data, etree.XMLParser(**SAFE))
        except etree.XMLSyntaxError:
            self._damaged[name] = None
            root = etree.fromstring(data, etree.XMLParser(recover=True, **SAFE))
            if root is None:
                raise
            return root

    def optional_xml(self, name: str | None) -> Any | None:
        """The root element of a part that a document can be read without; None if it is absent or broken."""
        from lxml import etree

        if name is not None and name in self:
            with suppress(etree.XMLSyntaxError):
                return self.xml(name)
        return None

    def elements(self, name: str, *tags: str) -> Iterator[Any]:
        """Yield elements of a part when they are complete, and forget them after that."""
        from lxml import etree

        reading = etree.iterparse(BytesIO(self.read(name)), tag=tags, recover=True, **SAFE)
        for _, node in reading:
            yield node
            node.clear()
            while node.getprevious() is not None:
                del node.getparent()[0]
        if reading.error_log.filter_from_errors():
            self._damaged[name] = None

    def damage(self) -> str:
        """The note about parts whose XML is damaged; empty if none of those that were read is."""
        named = ", ".join(list(self._damaged)[:_MOST_NAMED])
        return f"damaged, and read as far as it goes: {named}" if named else ""

    def relations(self, part: str = "") -> list[Relation]:
        """What a part refers to, or the package."""
        if part not in self._relations:
            self._relations[part] = self._read_relations(part)
        return self._relations[part]

    def relation(self, part: str, name: str) -> Relation | None:
        """The relation of a part that has an id; None if it has none of that id, or it leads outside."""
        found = (each for each in self.relations(part) if each.id == name and not each.external)
        return next(found, None)

    def _read_relations(self, part: str) -> list[Relation]:
        folder, name = posixpath.split(part)
        root = self.optional_xml(posixpath.join(folder, "_rels", f"{name}.rels"))
        found = []
        for node in root if root is not None else ():
            if not isinstance(node.tag, str) or node.get("Target") is None:
                continue
            external = node.get("TargetMode") == "External"
            target = node.get("Target").replace("\\", "/")
            if not external:
                target = posixpath.normpath(posixpath.join("/", folder, unquote(target)))[1:]
            kind = (node.get("Type") or "").rsplit("/", 1)[-1]
            found.append(Relation(node.get("Id") or "", kind, target, external))
        return found

    def related(self, part: str, kind: str) -> Iterator[str]:
        """Yield the parts of a kind that a part refers to, and that are there."""
        for relation in self.relations(part):
            if relation.kind == kind and not relation.external and relation.target in self:
                yield relation.target

    def roots(self, part: str, kind: str) -> Iterator[Any]:
        """Yield the root elements of such parts, without those that cannot be read."""
        for target in self.related(part, kind):
            root = self.optional_xml(target)
            if root is not None:
                yield root

    def main_part(self, kind: str) -> str:
        """Name of the main part of a file that is of this ``kind``. Raises ``KeyError``."""
        usual = next(path for *_, path, name in _KINDS if name == kind)
        main = self._main()[0] or usual
        if main not in self:
            raise KeyError(f"there is no part {main}")
        return main

    def kind(self) -> str | None:
        """``docx``, ``xlsx`` or ``pptx``, by the main part's content type, else by its root or its name."""
        main, declared = self._main()
        if main and not declared:
            declared = self.read(main)[:4096].decode("latin-1")  # the root's namespace has the same word
        for word, vendor, usual, name in _KINDS:
            if (word in declared or vendor in declared) and ".binary." not in declared:
                return name
            if not main and usual in self:
                return name
        return None

    def _main(self) -> tuple[str, str]:
        """Name and content type of the main part, as the package and its list of types name it."""
        main = next(self.related("", "officeDocument"), "")
        types = self.optional_xml("[Content_Types].xml")
        for node in types if types is not None else ():
            part, declared = _key(node.get("PartName") or ""), node.get("ContentType") or ""
            named = part == _key(main) if main else declared.endswith(".main+xml") and part in self
            if part and named:
                return part, declared
        return main, ""

    def title(self) -> str:
        """The title among the document's properties; empty without one."""
        for root in self.roots("", "core-properties"):
            found = root.find(f".//{_TITLE}")
            if found is not None:
                return one_line(found.text or "")
        return ""


SAFE: dict[str, bool] = {
    "resolve_entities": False,
    "no_network": True,
    "huge_tree": True,
    "remove_comments": True,
    "remove_pis": True,
}
"""Options of lxml's parsers for parts of unknown files."""


def relation_id(node: Any, name: str = "id") -> str:
    """The id of the relation that an element names."""
    return node.get(f"{_RELATION}{name}") or ""


def is_on(value: str | None) -> bool:
    """Whether a switch such as ``w:val`` is on: without a value it is."""
    return value not in ("0", "false", "off", "none")


def as_int(text: str | None, default: int = 0, base: int = 10) -> int:
    """A whole number of an attribute; ``default`` where it is none, for it only decorates."""
    try:
        return int(text or "", base)
    except ValueError:
        return default


def is_page_number(line: str) -> bool:
    """Whether a line of a margin says no more than the number of the page, which was left out."""
    words = re.findall(r"\w+", line.lower())
    if words and words[0] in _PAGE_WORDS:
        words = [word for word in words if not word.isdigit()]
    return not set(words) - _PAGE_WORDS


def drawing_text(node: Any) -> str:
    """The text of paragraphs of DrawingML, each on a line of its own."""
    paragraphs = ("".join(t.text or "" for t in p.iter(f"{_DRAWING}t")) for p in node.iter(f"{_DRAWING}p"))
    return "\n".join(filter(None, map(str.strip, paragraphs)))


def _key(name: str) -> str:
    return name.replace("\\", "/").lstrip("/").lower()
