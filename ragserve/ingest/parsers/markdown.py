"""Markdown: the unchanged source, whose marks help readers and models alike, without its front matter, whose
fields are metadata."""

from __future__ import annotations

import re

from ragserve.ingest.parsers.base import Parsed, Raw, has_words
from ragserve.ingest.parsers.charset import decode
from ragserve.ingest.parsers.front_matter import front_matter

_FENCE = re.compile(r"^(```|~~~).*?^\1", re.M | re.S)
_HEADING = re.compile(r"^# ++(\S.*)$", re.M)
_CLOSING = re.compile(r" #++\Z")  # of a heading: `# Title #`
_SETEXT = re.compile(r"^(\S.*+)\n=++ *+\r?$", re.M)


def parse(raw: Raw) -> Parsed:
    text, note = decode(raw.data, raw.charset)
    front = front_matter(text)
    title = front.title
    if has_words(text[front.end :]):  # else its fields are all that there is to read
        text = text[front.end :]
    if not title:
        prose = _FENCE.sub("", text)  # a comment in a shell example is not a heading
        found = min(
            (m for m in (_HEADING.search(prose), _SETEXT.search(prose)) if m),
            key=lambda m: m.start(),
            default=None,
        )
        title = found.group(1).rstrip() if found else ""
        if found and found.re is _HEADING:
            title = _CLOSING.sub("", title).rstrip()
    return Parsed(text, "text/markdown", title=title, metadata=dict(front.metadata), note=note)
