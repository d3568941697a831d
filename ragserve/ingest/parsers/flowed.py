"""Plain text of mail whose lines are soft (RFC 3676, ``format=flowed``)."""

from __future__ import annotations

_SIGNATURE = "-- "


def unflowed(text: str, *, delete_spaces: bool = False) -> str:
    """Text with its paragraphs whole: soft line ends are gone, and so are the blanks that stuff lines. Quoted
    paragraphs begin with a ``>`` for each level. ``delete_spaces`` is the parameter ``delsp``."""
    paragraphs: list[str] = []
    open_at: int | None = None  # the level of the paragraph that goes on
    for line in text.split("\n"):
        level = len(line) - len(line.lstrip(">"))
        line = line[level:].removeprefix(" ")
        soft = line.endswith(" ") and line != _SIGNATURE
        if soft and delete_spaces:
            line = line[:-1]
        if open_at == level and line != _SIGNATURE:
            paragraphs[-1] += line
        else:
            paragraphs.append(f"{'>' * level} {line}" if level else line)
        open_at = level if soft else None
    return "\n".join(paragraph.rstrip() for paragraph in paragraphs)
