"""Choose a file's parser by its content. The extension decides only between Markdown, code and plain text."""

from __future__ import annotations

import re
import zipfile
import zlib
from mimetypes import MimeTypes

from ragserve.errors import UnsupportedDocument
from ragserve.ingest.parsers.base import OCR_HINT, Raw, not_text, unreadable
from ragserve.ingest.parsers.languages import LANGUAGES
from ragserve.ingest.parsers.ooxml import Package

_HTML_START = re.compile(
    rb"\A\s*+(?:<\?xml[^>]*\?>\s*+)?(?:<!--.*?-->\s*+)*+<(?:!doctype\s++html|html[\s>])", re.I | re.S
)
_HTML_TAG = re.compile(
    rb"<(p|div|h[1-6]|body|head|article|section|span|table|ul|ol|dl|pre|blockquote|"
    rb"main|form|select|figure|details|center|font|title|meta|img|b|i|em|strong|sup|sub|a|br)[\s/>]",
    re.I,
)
_HTML_EXT = {".html", ".htm", ".xhtml"}
_MARKDOWN_EXT = {".md", ".markdown", ".mdown", ".mkd", ".mdx", ".qmd", ".rmd"}
# code that starts as HTML
_TEMPLATE_EXT = frozenset(
    [".php", ".jsp", ".erb", ".ejs", ".vue", ".svelte", ".hbs", ".mustache", ".jinja", ".j2", ".tmpl"]
)

# beginnings of files that are never text
_NEVER_TEXT: tuple[tuple[bytes, str], ...] = (
    (b"\x89PNG\r\n\x1a\n", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"GIF87a", "a GIF image"),
    (b"GIF89a", "a GIF image"),
    (b"II*\x00", "a TIFF image"),
    (b"MM\x00*", "a TIFF image"),
    (b"\x00\x00\x01\x00", "an icon"),
    (b"ID3\x02", "an MP3 recording"),
    (b"ID3\x03", "an MP3 recording"),
    (b"ID3\x04", "an MP3 recording"),
    (b"OggS\x00", "an Ogg recording"),
    (b"fLaC\x00", "a FLAC recording"),
    (b"\x1a\x45\xdf\xa3", "a Matroska or WebM video"),
    (b"wOFF", "a font"),
    (b"wOF2", "a font"),
    (b"\x1f\x8b", "gzip-compressed data"),
    (b"BZh", "bzip2-compressed data"),
    (b"\xfd7zXZ\x00", "xz-compressed data"),
    (b"\x28\xb5\x2f\xfd", "zstd-compressed data"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"Rar!\x1a\x07", "a RAR archive"),
    (b"!<arch>\n", "a static library or a Debian package"),
    (b"\x7fELF", "an ELF program"),
    (b"\xcf\xfa\xed\xfe", "a macOS program"),
    (b"\xca\xfe\xba\xbe", "a Java class or macOS program"),
    (b"\x00asm", "a WebAssembly program"),
    (b"SQLite format 3\x00", "an SQLite database"),
    (b"\x93NUMPY", "a NumPy array"),
)
BEGINNING = 4096
"""Bytes by which a file is known that is never text."""

# media types, by extension, of files that are never text if they hold NUL bytes
_NEVER_TEXT_TYPES = ("image/", "audio/", "video/", "font/", "application/octet-stream", "application/x-")
_MAGIC: tuple[tuple[bytes, str], ...] = ((b"%!PS", "a PostScript file (convert it to PDF)"),)
_MARKS = (b"\xff\xfe", b"\xfe\xff", b"\x00\x00\xfe\xff")  # of UTF-16 and UTF-32
# beginnings of images that OCR reads, and their extensions
_IMAGES = (
    (b"\x89PNG\r\n\x1a\n", ".png"),
    (b"\xff\xd8\xff", ".jpg"),
    (b"II*\x00", ".tiff"),
    (b"MM\x00*", ".tiff"),
    (b"BM", ".bmp"),
)
_MAIL_EXT = {".eml", ".mbox", ".mbx", ".mht", ".mhtml"}
_HEADER_LINE = rb"[!-9;-~]++:[^\n]*+\n"  # the first line of a message
_HEADER = re.compile(rb"\A" + _HEADER_LINE)
_MAILBOX = re.compile(
    rb"\AFrom \S[^\n]{0,400} \d\d?:\d\d[^\n]{0,40} \d{4}\s*\n(?:>From [^\n]*+\n)?" + _HEADER_LINE
)
_TABLE_EXT = {".csv", ".tsv"}
_JSON_LINES_EXT = {".jsonl", ".ndjson"}
_OBJECTS = re.compile(rb"\A\s*+\[\s*+\{")  # an array of them
_MEDIA_TYPES = MimeTypes()  # Python's own table: the system's may differ
_OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
_MAX_UNZIPPED = 512 * 2**20  # bytes; a file that unpacks to more is a zip bomb or no document

_FILENAMES = {
    "dockerfile": "dockerfile",
    "makefile": "makefile",
    "cmakelists.txt": "cmake",
    "jenkinsfile": "groovy",
}
_SHEBANGS = {"python": "python", "node": "javascript", "ruby": "ruby", "perl": "perl", "sh": "shell"}


def never_text(head: bytes, filename: str) -> str | None:
    """Name the kind of a file that is never text, such as an image or a program, by its `BEGINNING` and its
    name. Returns None for all others, archives of documents included."""
    for magic, what in _NEVER_TEXT:
        # a text may begin with words; no such file is without a NUL byte near its beginning
        if head.startswith(magic) and (b"\x00" in head or not magic.isascii() or not magic.isalnum()):
            return f"{what} ({OCR_HINT})" if image_ext(head) else what
    container = head[:4], head[4:8], head[8:12]
    if container[0] == b"RIFF" and container[2] in (b"WEBP", b"WAVE", b"AVI "):
        return "an image, a recording or a video (RIFF)"
    if container[1] == b"ftyp":
        return "a video or an image (ISO media)"
    if head[257:262] == b"ustar":
        return "a tar archive"
    media = _MEDIA_TYPES.guess_type(filename)[0] or ""
    if b"\x00" in head and not head.startswith(_MARKS) and media.startswith(_NEVER_TEXT_TYPES):
        return f"binary data ({media})"
    return None


def refuse_never_text(head: bytes, filename: str, *, ocr: bool) -> None:
    """Raise ``UnsupportedDocument`` for a file that is never text, by its first `BEGINNING` bytes and its
    name; with ``ocr`` not for an image."""
    if (what := never_text(head, filename)) and not (ocr and image_ext(head)):
        raise not_text(what)


def image_ext(head: bytes) -> str | None:
    """Extension of an image that OCR reads, by its first bytes; None for all other files."""
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return ".webp"
    found = next((ext for magic, ext in _IMAGES if head.startswith(magic)), None)
    return found if found != ".bmp" or b"\x00" in head else None


def detect(raw: Raw, *, ocr: bool = False) -> str:
    """Return one of ``PARSERS``; images are refused without ``ocr``. Raises ``UnsupportedDocument``, naming
    the format, if no parser reads it.

    Nothing is decoded here: the text parsers find out whether bytes without a known signature are text.
    """
    head = raw.data[:BEGINNING]
    if ocr and image_ext(head):
        return "ocr"
    if what := never_text(head, raw.filename):
        raise not_text(what)
    if b"%PDF-" in head[:1024]:
        return "pdf"
    if head.startswith(b"PK\x03\x04"):
        return _zip_kind(raw.data)
    if head.startswith(_OLE):
        # an encrypted Office file is an OLE container with this stream
        if _stream("EncryptedPackage") in raw.data:
            raise unreadable("encrypted", "an Office document with a password (remove the password)")
        return _ole_kind(raw)
    if head.startswith(b"{\\rtf"):
        return "rtf"
    for magic, what in _MAGIC:
        if head.startswith(magic):
            raise UnsupportedDocument(f"no parser for {what}")
    plain = head.removeprefix(b"\xef\xbb\xbf")
    if plain.startswith((b"\xff\xfe", b"\xfe\xff")):  # UTF-16: its ASCII characters are every other byte
        plain = plain.replace(b"\x00", b"")[2:]
    if _HTML_START.search(plain) and raw.ext not in _TEMPLATE_EXT:
        return "html"
    if raw.ext in _HTML_EXT and _HTML_TAG.search(plain):
        return "html"
    if _MAILBOX.match(plain):
        return "mbox"
    if raw.ext in _MAIL_EXT and _HEADER.match(plain):
        return "mail"
    if raw.ext in _TABLE_EXT:
        return "delimited"
    if raw.ext in _JSON_LINES_EXT or (raw.ext == ".json" and _OBJECTS.match(plain)):
        return "records"
    if raw.ext in _MARKDOWN_EXT:
        return "markdown"
    return "code" if language_of(raw) else "text"


def language_of(raw: Raw) -> str | None:
    """Programming or data language by extension, well-known file name or ``#!`` line; None if unknown."""
    named = LANGUAGES.get(raw.ext) or _FILENAMES.get(raw.filename.lower())
    if named or not raw.data.startswith(b"#!"):
        return named
    line = raw.data.split(b"\n", 1)[0].decode("ascii", "replace")
    return next((language for word, language in _SHEBANGS.items() if word in line), None)


def _ole_kind(raw: Raw) -> str:
    """The parser of an OLE container, by the streams that its directory names, else by the extension."""
    for kind, stream in (("doc", "WordDocument"), ("msg", "__properties_version1.0")):
        if _stream(stream) in raw.data or raw.ext == f".{kind}":
            return kind
    raise UnsupportedDocument("a legacy Office file, .xls or .ppt (save it in its new format)")


def _stream(name: str) -> bytes:
    return name.encode("utf-16-le")


def _zip_kind(data: bytes) -> str:
    try:
        package = Package(data)
        kind = "epub" if "META-INF/container.xml" in package else package.kind()
        if kind is None and "content.xml" in package:
            kind = "odf"
    except (zipfile.BadZipFile, zlib.error, ValueError, OSError) as error:
        why = f"a broken zip container such as a truncated .docx or .xlsx ({error})"
        raise unreadable("corrupt", why) from error
    except RuntimeError as error:  # zipfile's, of encryption and compressions that it does not know
        raise unreadable("encrypted", str(error)) from error
    if kind is not None:
        if package.size > _MAX_UNZIPPED:
            raise UnsupportedDocument(f"the .{kind} unpacks to more than {_MAX_UNZIPPED >> 20} MiB")
        return kind
    if "xl/workbook.bin" in package:
        raise UnsupportedDocument("no parser for a binary Excel workbook (save it as .xlsx)")
    raise not_text("a zip archive (unpack it)")
