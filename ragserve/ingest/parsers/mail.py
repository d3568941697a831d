"""E-mail messages: subject, sender, recipients, date and text. Attachments are named, not read."""

from __future__ import annotations

import email
from collections.abc import Iterator
from contextlib import suppress
from email.errors import HeaderParseError
from email.header import decode_header, make_header
from email.message import Message

from ragserve.errors import UnsupportedDocument
from ragserve.ingest.parsers.base import Parsed, Raw, one_line, tidy, unreadable, without_controls
from ragserve.ingest.parsers.charset import decode
from ragserve.ingest.parsers.html import decode_page
from ragserve.ingest.parsers.html import part as html_part

_SHOWN = ("Subject", "From", "To", "Cc", "Date")
_PREFERRED = ("text/plain", "multipart/related", "text/html")  # of the alternatives of one text


def parse(raw: Raw) -> Parsed:
    try:
        message = email.message_from_bytes(raw.data)
        text = message_text(message)
    except RecursionError as error:
        raise unreadable("corrupt", "not readable as a message (nested too deeply)") from error
    return Parsed(text, "message/rfc822", title=header(message, "Subject"))


def message_text(message: Message) -> str:
    """The headers that a reader sees, and the text. Raises ``UnsupportedDocument`` if it is encrypted."""
    if _is_encrypted(message):
        raise unreadable("encrypted", "an encrypted message (save it decrypted)")
    heads = [f"{name}: {value}" for name in _SHOWN if (value := header(message, name))]
    files = [one_line(name) for part in message.walk() if (name := _attached(part))]
    parts = ["\n".join(heads), *_texts(message), f"Attachments: {', '.join(files)}" if files else ""]
    return "\n\n".join(filter(None, (tidy(without_controls(part)).strip() for part in parts)))


def header(message: Message, name: str) -> str:
    """A header's text on one line; empty without it."""
    value = message.get(name, "")
    text = str(value)
    with suppress(HeaderParseError, LookupError, ValueError):  # an unknown charset, or broken base64
        text = str(make_header(decode_header(value)))
    return one_line(text)


def _is_encrypted(message: Message) -> bool:
    kind = message.get_content_type()
    sealed = kind in ("application/pkcs7-mime", "application/x-pkcs7-mime")
    return kind == "multipart/encrypted" or (sealed and message.get_param("smime-type") != "signed-data")


def _attached(part: Message) -> str:
    if part.is_multipart():
        return ""
    if part.get_content_maintype() == "text" and part.get_content_disposition() != "attachment":
        return ""
    return part.get_filename() or part.get_content_type()


def _texts(part: Message) -> Iterator[str]:
    """Yield the texts of a message, of alternatives the first that has some: plain text before HTML."""
    payload = part.get_payload()
    below = [each for each in payload if isinstance(each, Message)] if isinstance(payload, list) else None
    if part.get_content_type() == "multipart/alternative" and below:
        order = {kind: place for place, kind in enumerate(_PREFERRED)}
        for choice in sorted(below, key=lambda each: order.get(each.get_content_type(), 1)):
            if texts := list(filter(None, _texts(choice))):
                yield from texts
                return
    elif below is not None:
        for each in below:
            yield from _texts(each)
    elif part.get_content_maintype() == "text" and not _attached(part):
        text = _decoded(part)
        yield html_part(text, scripts=False).text if part.get_content_subtype() == "html" else text


def _decoded(part: Message) -> str:
    data = part.get_payload(decode=True)
    if not isinstance(data, bytes) or not data:
        return ""
    try:
        reader = decode_page if part.get_content_subtype() == "html" else decode
        return reader(data, part.get_content_charset()).text.replace("\r\n", "\n")
    except UnsupportedDocument:  # the other parts are readable
        return data.decode("utf-8", "replace")
