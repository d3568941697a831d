"""Mailboxes in the mbox format: a page per message."""

from __future__ import annotations

import email
import re
from collections import Counter
from dataclasses import replace

from ragserve.errors import UnsupportedDocument
from ragserve.ingest.parsers.attached import Attachments
from ragserve.ingest.parsers.base import Parsed, Raw, joined_notes, paged, unreadable
from ragserve.ingest.parsers.mail import collect_files, message_text

_NOTES = 6  # about messages, the most frequent ones
# a line before a message: who sent it, and when. Python's mailbox takes every line that begins with "From "
_BEFORE = re.compile(rb"^From \S[^\n]{0,200} \d\d?:\d\d[^\n]{0,40} \d{4}\b[^\n]{0,20}\n", re.M)
_QUOTED = re.compile(rb"^>(>*+From )", re.M)  # a line of text that else would begin a message


def parse(raw: Raw) -> Parsed:
    pages: list[str] = []
    unread: list[int] = []
    notes: Counter[str] = Counter()
    files = Attachments()
    messages = _BEFORE.split(raw.data.replace(b"\r\n", b"\n"))[1:]
    for number, message in enumerate(messages, 1):
        try:
            source = _QUOTED.sub(rb"\1", message)
            read = email.message_from_bytes(source)
            text, note = message_text(read, hidden=raw.hidden)
            pages.append(text)
            collect_files(read, files, f"{number}/")
            notes[note] += 1
        except (UnsupportedDocument, RecursionError):
            pages.append("")
            unread.append(number)
    if not any(pages):
        raise unreadable("encrypted" if unread else "empty", f"no readable message of {len(pages)}")
    shown = ", ".join(map(str, unread[:20]))
    told = f"{len(unread)} messages are encrypted or damaged: {shown}" if unread else ""
    parts = [f"{n} messages: {note}" if n > 1 else note for note, n in notes.most_common(_NOTES) if note]
    read_as = paged(pages, "application/mbox", "message", note=joined_notes(told, *parts, files.note))
    return replace(read_as, attachments=tuple(files.found))
