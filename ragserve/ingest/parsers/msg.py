"""Messages that Outlook saved (``.msg``), by python-oxmsg: they are read as e-mail is."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from ragserve.ingest.parsers import html, rtf
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

MIME = "application/vnd.ms-outlook"
_HTML, _RTF, _MIME_TAG, _CONTENT_ID, _FLAGS, _EMBEDDED = 0x1013, 0x1009, 0x370E, 0x3712, 0x3714, 5
_METHOD, _DELIVERED, _NAME = 0x3705, 0x0E06, 0x3001
_EMBEDDED_STORAGE = "__substg1.0_3701000D"
_KINDS = {0: "To", 1: "To", 2: "Cc"}
_RECIPIENT_KIND = 0x0C15
_PIECE = 8  # bytes of the header of an embedded message's properties that a file's has more
_INLINE = 4  # of the flags: shown within the text
_MOST_LEVELS = 5  # of messages within messages that are read as text


def parse(raw: Raw) -> Parsed:
    from oxmsg import Message

    try:
        message = Message.load(raw.data)
        reading = _Outlook(raw)
        text = reading.message(message, 0)
        title = one_line(message.subject)
    except (OSError, ValueError, KeyError, IndexError, AttributeError, AssertionError, TypeError) as error:
        raise unreadable(
            "corrupt", f"not readable as an Outlook message: {error} (save it as .eml)"
        ) from error
    except RecursionError as error:
        raise unreadable("corrupt", "not readable as a message (nested too deeply)") from error
    if not text:
        raise unreadable("corrupt", "an Outlook message without a header or text (save it as .eml)")
    note = joined_notes(
        *reading.notes, html.hidden_note(0 if raw.hidden else reading.n_hidden), reading.files.note
    )
    return Parsed(text, MIME, title, note=note, attachments=tuple(reading.files.found))


class _Outlook:
    """Reads a message and those within it, and collects their files."""

    def __init__(self, raw: Raw) -> None:
        self.files = Attachments()
        self.notes: list[str] = []
        self.n_hidden = 0
        self._raw = raw

    def message(self, message: Any, level: int) -> str:
        properties = message.properties
        date = message.sent_date or properties.date_prop_value(_DELIVERED)
        heads = {"Subject": message.subject, "From": message.sender or "", **self._recipients(message)}
        heads["Date"] = date.strftime("%a, %d %b %Y %H:%M:%S %z") if date else ""
        lines = [f"{name}: {shown}" for name, value in heads.items() if (shown := one_line(value))]
        parts = ["\n".join(lines), self._body(message)]
        names: list[str] = []
        for attached in message.attachments:
            inner = self._within(attached, level)
            if inner:
                parts.append(inner)
            elif name := self._file(attached):
                names.append(name)
        parts.append(f"Attachments: {', '.join(names)}" if names else "")
        return "\n\n".join(filter(None, (tidy(without_controls(part)).strip() for part in parts)))

    def _recipients(self, message: Any) -> dict[str, str]:
        found: dict[str, list[str]] = {"To": [], "Cc": []}
        for each in message.recipients:
            kind = _KINDS.get(each.properties.int_prop_value(_RECIPIENT_KIND) or 1)
            address = f"<{each.email_address}>" if each.email_address else ""
            if kind:
                found[kind].append(" ".join(filter(None, [each.name, address])))
        return {kind: ", ".join(people) for kind, people in found.items()}

    def _body(self, message: Any) -> str:
        plain = (message.body or "").replace("\r\n", "\n").strip()
        if plain:
            return plain
        if data := message.properties.binary_prop_value(_HTML):
            text, note = html.decode_page(data, message.properties.body_encoding)
            self.notes.append(note)
        else:
            text = message.html_body or ""
        if text:
            page = html.part(text.replace("\r\n", "\n"), hidden=self._raw.hidden, scripts=False)
            self.n_hidden += page.n_hidden
            return page.text
        if packed := message.properties.binary_prop_value(_RTF):
            from compressed_rtf import decompress

            source = Raw(decompress(packed), "body.rtf", ".rtf", hidden=self._raw.hidden)
            return rtf.parse(source).text
        return ""

    def _within(self, attached: Any, level: int) -> str:
        """The text of a message that is attached as one; empty for a file."""
        from oxmsg import Message

        if attached.properties.int_prop_value(_METHOD) != _EMBEDDED or level >= _MOST_LEVELS:
            return ""
        for storage in attached._storage.storages:
            if storage.name == _EMBEDDED_STORAGE:
                with suppress(KeyError, ValueError, IndexError, AttributeError):
                    return self.message(Message(_Embedded(storage)), level + 1)
        return ""

    def _file(self, attached: Any) -> str:
        """Take a file, and return its name for the message's text."""
        properties = attached.properties
        name = attached.file_name or properties.str_prop_value(_NAME) or ""
        kind = (properties.str_prop_value(_MIME_TAG) or "").lower()
        flags = properties.int_prop_value(_FLAGS) or 0
        inline = bool(flags & _INLINE) or bool(properties.str_prop_value(_CONTENT_ID))
        image = kind.startswith("image/") or name.lower().endswith((".png", ".jpg", ".jpeg", ".gif", ".bmp"))
        kind = kind or ("image/unknown" if image else "")
        self.files.add(name, kind, attached.file_bytes, inline=inline, charset=None)
        return one_line(name)


class _Embedded:
    """An embedded message's storage as oxmsg expects that of a file, whose properties begin 8 bytes later."""

    def __init__(self, storage: Any) -> None:
        self._storage = storage

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    @property
    def properties_stream_bytes(self) -> bytes:
        return (
            bytes(self._storage.properties_stream_bytes[:24])
            + bytes(_PIECE)
            + self._storage.properties_stream_bytes[24:]
        )
