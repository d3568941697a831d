"""EPUB books: a page per chapter, which is a document of the spine, in its order."""

from __future__ import annotations

import posixpath
from urllib.parse import unquote

from ragserve.ingest.parsers.base import (
    Parsed,
    Raw,
    container_errors,
    joined_notes,
    left_out,
    one_line,
    paged,
    unreadable,
)
from ragserve.ingest.parsers.html import decode_page, hidden_note, part
from ragserve.ingest.parsers.ooxml import Package

MIME = "application/epub+zip"
_MAIN = "META-INF/container.xml"
_ENCRYPTION = "META-INF/encryption.xml"
# fonts are scrambled in many books that everyone may read
_OF_FONTS = ("http://www.idpf.org/2008/embedding", "http://ns.adobe.com/pdf/enc#RC")
_PAGES = ("application/xhtml+xml", "text/html", "application/x-dtbook+xml")


def parse(raw: Raw) -> Parsed:
    with container_errors("an EPUB book"):
        book = Package(raw.data)
        _refuse_encrypted(book)
        package_path = book.xml(_MAIN).find(".//{*}rootfile").get("full-path")
        package = book.xml(package_path)
        items = {item.get("id"): item for item in package.iterfind(".//{*}manifest/{*}item")}
        listed = [items.get(ref.get("idref")) for ref in package.iterfind(".//{*}spine/{*}itemref")]
        spine = [item for item in listed if item is not None]
        folder = posixpath.dirname(package_path)
        paths = [
            posixpath.normpath(posixpath.join(folder, unquote(item.get("href"))))
            for item in spine
            if item.get("media-type") in _PAGES
        ]
        missing = len(listed) - len(spine) + sum(path not in book for path in paths)
        if paths and not any(path in book for path in paths):
            raise KeyError("none of its chapters is there")
        # one that is missing keeps its number
        read = (decode_page(book.read(path)).text if path in book else "" for path in paths)
        chapters = [part(source, hidden=raw.hidden) for source in read]
        title = one_line(package.findtext(".//{http://purl.org/dc/elements/1.1/}title") or "")
    names, texts = [chapter.heading for chapter in chapters], [chapter.text for chapter in chapters]
    hidden = hidden_note(0 if raw.hidden else sum(chapter.n_hidden for chapter in chapters))
    note = joined_notes(book.damage(), left_out({"chapters that are missing": missing}), hidden)
    return paged(texts, MIME, "chapter", names=names, title=title, note=note)


def _refuse_encrypted(book: Package) -> None:
    if _ENCRYPTION in book:
        methods = book.xml(_ENCRYPTION).iterfind(".//{*}EncryptedData/{*}EncryptionMethod")
        if any(method.get("Algorithm") not in _OF_FONTS for method in methods):
            raise unreadable("encrypted", "a book with copy protection")
