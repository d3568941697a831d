"""EPUB books: a page per chapter, which is a document of the spine, in its order."""

from __future__ import annotations

import posixpath
import zipfile
from io import BytesIO
from typing import Any
from urllib.parse import unquote

from ragserve.ingest.parsers.base import Parsed, Raw, container_errors, one_line, paged, unreadable
from ragserve.ingest.parsers.html import decode_page, hidden_note, part

MIME = "application/epub+zip"
_MAIN = "META-INF/container.xml"
_ENCRYPTION = "META-INF/encryption.xml"
# fonts are scrambled in many books that everyone may read
_OF_FONTS = ("http://www.idpf.org/2008/embedding", "http://ns.adobe.com/pdf/enc#RC")
_PAGES = ("application/xhtml+xml", "text/html", "application/x-dtbook+xml")


def parse(raw: Raw) -> Parsed:
    with container_errors("an EPUB book"), zipfile.ZipFile(BytesIO(raw.data)) as book:
        _refuse_encrypted(book)
        package_path = _xml(book, _MAIN).find(".//{*}rootfile").get("full-path")
        package = _xml(book, package_path)
        items = {item.get("id"): item for item in package.iterfind(".//{*}manifest/{*}item")}
        spine = [items[ref.get("idref")] for ref in package.iterfind(".//{*}spine/{*}itemref")]
        folder = posixpath.dirname(package_path)
        paths = [
            posixpath.normpath(posixpath.join(folder, unquote(item.get("href"))))
            for item in spine
            if item.get("media-type") in _PAGES
        ]
        chapters = [part(decode_page(book.read(path)).text, hidden=raw.hidden) for path in paths]
        title = one_line(package.findtext(".//{http://purl.org/dc/elements/1.1/}title") or "")
    names, texts = [chapter.heading for chapter in chapters], [chapter.text for chapter in chapters]
    note = hidden_note(0 if raw.hidden else sum(chapter.n_hidden for chapter in chapters))
    return paged(texts, MIME, "chapter", names=names, title=title, note=note)


def _refuse_encrypted(book: zipfile.ZipFile) -> None:
    if _ENCRYPTION in book.namelist():
        methods = _xml(book, _ENCRYPTION).iterfind(".//{*}EncryptedData/{*}EncryptionMethod")
        if any(method.get("Algorithm") not in _OF_FONTS for method in methods):
            raise unreadable("encrypted", "a book with copy protection")


def _xml(book: zipfile.ZipFile, path: str) -> Any:
    from lxml import etree  # type: ignore[import-untyped]

    return etree.fromstring(book.read(path), etree.XMLParser(resolve_entities=False, no_network=True))
