"""E-mail messages: subject, sender, recipients, date and text, also those of messages that they hold.
Attachments are named in the text and become documents of their own. Pages of the web that a browser saved as
a message (MHT) are read as pages."""

from __future__ import annotations

import email
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from email.errors import HeaderParseError
from email.header import decode_header
from email.message import Message

from ragserve.errors import UnsupportedDocument
from ragserve.ingest.parsers import html
from ragserve.ingest.parsers.attached import Attachments
from ragserve.ingest.parsers.base import (
    Parsed,
    Raw,
    joined_notes,
    one_line,
    tidy,
    unreadable,
    without_controls,
)
from ragserve.ingest.parsers.charset import decode
from ragserve.ingest.parsers.flowed import unflowed

_SHOWN = ("Subject", "From", "To", "Cc", "Date")
_PREFERRED = ("text/plain", "multipart/related", "text/html")  # of the alternatives of one text
_SAVED_PAGE = (".mht", ".mhtml")
_NO_TEXT = ("css", "javascript", "ecmascript")  # of text/...
_WORD = re.compile(r"\w+")
_TAG = re.compile(rb"<[^<>]*+>")
_SAME = 0.5  # share of the words of HTML that its plain text must have to stand for it
_LONGER = 1.5  # times the characters of the plain text; shorter HTML is no more than another text
_CONTEXT = 4096  # bytes of the text that tell the charset of a header


def parse(raw: Raw) -> Parsed:
    try:
        message = email.message_from_bytes(raw.data)
        if raw.ext in _SAVED_PAGE and (page := _saved_page(message, raw)):
            return page
        text, note = message_text(message, hidden=raw.hidden)
    except RecursionError as error:
        raise unreadable("corrupt", "not readable as a message (nested too deeply)") from error
    files = Attachments()
    collect_files(message, files)
    title = header(message, "Subject")
    return Parsed(
        text, "message/rfc822", title, note=joined_notes(note, files.note), attachments=tuple(files.found)
    )


def message_text(message: Message, *, hidden: bool = False) -> tuple[str, str]:
    """The headers that a reader sees and the text of a message, and a note about what was guessed or left
    out. Raises ``UnsupportedDocument`` if it is encrypted."""
    reading = _MessageReader(hidden)
    text = reading.message(message)
    return text, joined_notes(*reading.notes, html.hidden_note(0 if hidden else reading.n_hidden))


def collect_files(message: Message, files: Attachments, where: str = "") -> None:
    """Take the files of a message, and of the messages in it that are read as its text."""
    for part in message.walk():
        if part.is_multipart() or (_is_text(part) and part.get_content_disposition() != "attachment"):
            continue
        data = part.get_payload(decode=True)
        files.add(
            _attached(part) if part.get_filename() else f"attachment.{part.get_content_subtype()}",
            part.get_content_type(),
            data if isinstance(data, bytes) else None,
            inline=bool(part["Content-ID"]) or part.get_content_disposition() == "inline",
            charset=part.get_content_charset(),
            where=where,
        )


def header(message: Message, name: str) -> str:
    """A header's text on one line, raw or encoded; empty without it."""
    found = next((value for key, value in message.raw_items() if key.lower() == name.lower()), "")
    return one_line(_words(_readable(str(found), message)))


@dataclass
class _MessageReader:
    """Reads one message, and collects what there is to say about it."""

    hidden: bool
    notes: list[str] = field(default_factory=list)
    n_hidden: int = 0

    def message(self, message: Message) -> str:
        if _is_encrypted(message):
            raise unreadable("encrypted", "an encrypted message (save it decrypted)")
        heads = [f"{name}: {value}" for name in _SHOWN if (value := header(message, name))]
        files = [one_line(name) for part in _own_parts(message) if (name := _attached(part))]
        parts = ["\n".join(heads), *self._texts(message)]
        parts.append(f"Attachments: {', '.join(files)}" if files else "")
        return "\n\n".join(filter(None, (tidy(without_controls(part)).strip() for part in parts)))

    def _texts(self, part: Message) -> Iterator[str]:
        """Yield the texts of a message: of alternatives plain text, if it says what the others say."""
        payload = part.get_payload()
        below = [each for each in payload if isinstance(each, Message)] if isinstance(payload, list) else None
        if part.get_content_type() == "multipart/alternative" and below:
            yield from self._alternative(below)
        elif below is not None:
            for each in below:
                if part.get_content_type() == "message/rfc822":
                    yield self._enclosed(each)
                else:
                    yield from self._texts(each)
        elif _is_text(part) and not _attached(part):
            yield self._text(part)

    def _enclosed(self, message: Message) -> str:
        """A message within a message, under its own headers."""
        try:
            return self.message(message)
        except UnsupportedDocument as error:  # encrypted; the outer one is readable
            self.notes.append(f"an attached message is left out: {error.message}")
            return ""

    def _alternative(self, parts: list[Message]) -> Iterator[str]:
        order = {kind: place for place, kind in enumerate(_PREFERRED)}
        found: list[list[str]] = []
        for part in sorted(parts, key=lambda each: order.get(each.get_content_type(), 1)):
            if found and not _may_say_more(part, found[0]):
                continue
            before = len(self.notes), self.n_hidden
            texts = [text for text in self._texts(part) if text.strip()]
            if not texts:
                continue
            if found and not _says_more(texts, found[0]):
                del self.notes[before[0] :]
                self.n_hidden = before[1]
                continue
            found.insert(0, texts)
        if found:
            yield from found[0]

    def _text(self, part: Message) -> str:
        subtype = part.get_content_subtype()
        data = part.get_payload(decode=True)
        if not isinstance(data, bytes) or not data or subtype in _NO_TEXT:
            return ""
        try:
            reader = html.decode_page if subtype == "html" else decode
            text, note = reader(data, part.get_content_charset())
        except UnsupportedDocument:  # the other parts are readable
            text, note = data.decode("utf-8", "replace"), "a part is in no charset that could be recognised"
        self.notes.append(note)
        text = text.replace("\r\n", "\n")
        if subtype == "html":
            page = html.part(text, hidden=self.hidden, scripts=False)
            self.n_hidden += page.n_hidden
            return page.text
        if subtype == "plain" and str(part.get_param("format", "")).lower() == "flowed":
            return unflowed(text, delete_spaces=str(part.get_param("delsp", "")).lower() == "yes")
        return text


def _saved_page(message: Message, raw: Raw) -> Parsed | None:
    """The pages of a saved page of the web: it, and those in its frames. None if there is none."""
    url = header(message, "Snapshot-Content-Location") or raw.url
    pages: list[Parsed] = []
    for part in message.walk():
        data = part.get_payload(decode=True)
        if part.get_content_type() in ("text/html", "application/xhtml+xml") and isinstance(data, bytes):
            source = Raw(
                data, raw.filename, ".html", url, part.get_content_charset(), raw.hidden, raw.comments
            )
            with suppress(UnsupportedDocument):
                pages.append(html.parse(source))
    text = "\n\n".join(page.text for page in pages if page.text)
    if not text:
        return None
    note = joined_notes(*(page.note for page in pages))
    return Parsed(text, "multipart/related", title=header(message, "Subject") or pages[0].title, note=note)


def _may_say_more(part: Message, than: list[str]) -> bool:
    """Return whether `_says_more` may hold of an alternative, by its size: most HTML says what the plain text
    says, and need not be read. An invitation for calendars never does."""
    if part.get_content_subtype() != "html":
        return part.get_content_type() != "text/calendar"
    data = part.get_payload(decode=True)
    return isinstance(data, bytes) and len(_TAG.sub(b"", data)) > _LONGER * sum(map(len, than))


def _says_more(texts: list[str], than: list[str]) -> bool:
    """Return whether another text is shorter and has few of the words: it asks its reader to open
    ``texts``."""
    long, short = " ".join(texts).lower(), " ".join(than).lower()
    words = set(_WORD.findall(long))
    return len(long) > _LONGER * len(short) and len(words & set(_WORD.findall(short))) < _SAME * len(words)


def _readable(value: str, message: Message) -> str:
    """A raw header as text. Bytes without a charset are in that of the message's text, as far as it is
    known."""
    data = value.encode("utf-8", "surrogateescape")
    if data.isascii() and b"\x1b$" not in data:  # the escape of Japanese and Korean mail
        return value
    text = next((part for part in message.walk() if part.get_content_maintype() == "text"), None)
    body = text.get_payload(decode=True) if text is not None else b""
    context = body[:_CONTEXT] if isinstance(body, bytes) else b""
    line = data.replace(b"\n", b" ").replace(b"\r", b" ")
    declared = text.get_content_charset() if text is not None else None
    for sample in (line, line + b"\n" + context) if declared else (line + b"\n" + context, line):
        with suppress(UnsupportedDocument):
            return decode(sample, declared).text.split("\n", 1)[0]
    return data.decode("utf-8", "replace")


def _words(value: str) -> str:
    """A header's text with its encoded words decoded."""
    try:
        parts = decode_header(value)
    except (HeaderParseError, ValueError):  # broken base64
        return value
    texts: list[str] = []
    for part, charset in parts:
        if isinstance(part, str):
            texts.append(part)
        elif charset is None:
            texts.append(part.decode("raw-unicode-escape"))
        else:
            try:
                texts.append(decode(part, charset).text)
            except UnsupportedDocument:
                texts.append(part.decode("utf-8", "replace"))
    return "".join(texts)


def _is_encrypted(message: Message) -> bool:
    kind = message.get_content_type()
    sealed = kind in ("application/pkcs7-mime", "application/x-pkcs7-mime")
    return kind == "multipart/encrypted" or (sealed and message.get_param("smime-type") != "signed-data")


def _own_parts(message: Message) -> Iterator[Message]:
    """Yield a message's parts, without those of messages in it."""
    yield message
    payload = message.get_payload()
    if isinstance(payload, list) and message.get_content_type() != "message/rfc822":
        for part in payload:
            if isinstance(part, Message):
                yield from _own_parts(part)


def _is_text(part: Message) -> bool:
    """Return whether a part is text, as one of several parts is whose boundary is missing."""
    return part.get_content_maintype() in ("text", "multipart") and not part.is_multipart()


def _attached(part: Message) -> str:
    if part.is_multipart():
        return ""
    if _is_text(part) and part.get_content_disposition() != "attachment":
        return ""
    name = part.get_filename()
    return _words(_readable(name, part)) if name else part.get_content_type()
