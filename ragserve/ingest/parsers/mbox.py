"""Mailboxes in the mbox format: a page per message."""

from __future__ import annotations

import email
import mailbox
import tempfile
from collections import Counter

from ragserve.errors import UnsupportedDocument
from ragserve.ingest.parsers.base import Parsed, Raw, joined_notes, paged, unreadable
from ragserve.ingest.parsers.mail import message_text

_NOTES = 6  # about messages, the most frequent ones


def parse(raw: Raw) -> Parsed:
    pages: list[str] = []
    unread: list[int] = []
    notes: Counter[str] = Counter()
    # the library reads files only; one without a name is gone with this process, however it ends
    with tempfile.TemporaryFile() as copy:
        copy.write(raw.data)
        copy.flush()
        box = mailbox.mbox(f"/proc/self/fd/{copy.fileno()}", create=False)
        try:
            for number, key in enumerate(box.iterkeys(), 1):
                try:
                    text, note = message_text(email.message_from_bytes(box.get_bytes(key)), hidden=raw.hidden)
                    pages.append(text)
                    notes[note] += 1
                except (UnsupportedDocument, RecursionError):
                    pages.append("")
                    unread.append(number)
        finally:
            box.close()
    if not any(pages):
        raise unreadable("encrypted" if unread else "empty", f"no readable message of {len(pages)}")
    shown = ", ".join(map(str, unread[:20]))
    told = f"{len(unread)} messages are encrypted or damaged: {shown}" if unread else ""
    parts = [f"{n} messages: {note}" if n > 1 else note for note, n in notes.most_common(_NOTES) if note]
    return paged(pages, "application/mbox", "message", note=joined_notes(told, *parts))
