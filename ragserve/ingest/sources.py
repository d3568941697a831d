"""What a command line names, as a list of files: each real file once, in a stable order, whatever links and
loops there are.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from ragserve.errors import InvalidRequest

__all__ = ["Scan", "clean_name", "is_url", "matches", "parse_metadata", "scan"]

_MAX_NAME = 255  # characters of a source name given by a client


@dataclass(slots=True)
class Scan:
    """``sources``: real paths and URLs to ingest. ``failed``, ``skipped``: (source, reason). ``roots``: real
    paths of directories given.
    """

    sources: list[str] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    roots: list[str] = field(default_factory=list)


def is_url(text: str) -> bool:
    return text.lower().startswith(("http://", "https://"))


def scan(
    inputs: Sequence[str], *, recursive: bool = False, globs: Sequence[str] = (), exclude: Path | None = None
) -> Scan:
    """Walk ``inputs``. Directories are read one level deep, or fully with ``recursive``; hidden entries only
    when named themselves.

    Symbolic links are followed; a file or directory reached twice (a loop, a second link) counts once, under
    its real path. ``globs`` restrict what is taken from directories, see `matches`. ``exclude`` is a
    directory never entered: our own data."""
    found = Scan()
    seen: set[tuple[int, int]] = set()
    if exclude is not None and exclude.is_dir():
        seen.add(_identity(exclude.stat()))
    for given in inputs:
        if is_url(given):
            if given not in found.sources:
                found.sources.append(given)
            continue
        path = os.path.realpath(os.path.expanduser(given))
        status = _stat(path, found, missing="no such file or directory")
        if status is None:
            continue
        if stat.S_ISDIR(status.st_mode):
            if path not in found.roots:
                found.roots.append(path)
            _walk(path, status, found, seen, recursive=recursive, globs=globs)
        elif stat.S_ISREG(status.st_mode):
            _take(path, status, found, seen)
        else:
            found.failed.append((printable(path), "not a regular file"))
    return found


def matches(relative: str, globs: Sequence[str]) -> bool:
    """Whether a path relative to its directory matches: a pattern without ``/`` by name, one with ``/`` as a
    whole (* spans ``/``).
    """
    name = relative.rsplit("/", 1)[-1]
    return not globs or any(fnmatchcase(relative if "/" in pattern else name, pattern) for pattern in globs)


def _walk(
    root: str,
    status: os.stat_result,
    found: Scan,
    seen: set[tuple[int, int]],
    *,
    recursive: bool,
    globs: Sequence[str],
) -> None:
    stack = [(root, status)]
    while stack:
        directory, status = stack.pop()
        if _identity(status) in seen:
            continue
        seen.add(_identity(status))
        below: list[tuple[str, os.stat_result]] = []
        for entry in _entries(directory, found):
            path = os.path.join(directory, entry)
            status_ = _stat(path, found, missing="a broken symbolic link")
            if status_ is None:
                continue
            if stat.S_ISDIR(status_.st_mode):
                if recursive:
                    below.append((path, status_))
            elif not matches(os.path.relpath(path, root), globs):
                continue
            elif stat.S_ISREG(status_.st_mode):
                _take(os.path.realpath(path), status_, found, seen)
            else:
                found.skipped.append((printable(path), "not a regular file"))
        stack.extend(reversed(below))


def _entries(directory: str, found: Scan) -> Iterator[str]:
    try:
        names = sorted(os.listdir(directory))
    except OSError as error:
        found.failed.append((printable(directory), f"unreadable directory: {error.strerror}"))
        return
    yield from (name for name in names if not name.startswith("."))


def _stat(path: str, found: Scan, *, missing: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except FileNotFoundError:
        found.failed.append((printable(path), missing))
    except OSError as error:  # ELOOP: a link to itself; EACCES; ENAMETOOLONG
        found.failed.append((printable(path), f"unreadable: {error.strerror}"))
    return None


def _take(path: str, status: os.stat_result, found: Scan, seen: set[tuple[int, int]]) -> None:
    if _identity(status) in seen:
        return
    seen.add(_identity(status))
    if printable(path) != path:
        found.failed.append((printable(path), "its name is not UTF-8 (rename it)"))
    else:
        found.sources.append(path)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def printable(path: str) -> str:
    """``path`` as text that can be stored and printed; names that are not UTF-8 come with escapes."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def parse_metadata(pairs: Sequence[str]) -> dict[str, str | int | float | bool]:
    """``key=value`` options; ``true``/``false`` and numbers become such, so that range filters work on them.
    Raises ``InvalidRequest``.
    """
    out: dict[str, str | int | float | bool] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise InvalidRequest(f"--metadata {pair!r} is not key=value.", param="metadata")
        out[key.strip()] = _typed(value)
    return out


def _typed(value: str) -> str | int | float | bool:
    if value.lower() in {"true", "false"}:
        return value.lower() == "true"
    digits = value.removeprefix("-")
    if (
        digits.isascii()
        and digits.replace(".", "", 1).isdigit()
        and (digits == "0" or not digits.startswith("0") or "." in digits)
    ):
        return float(value) if "." in value else int(value)  # 007 and 1e5 stay text: codes, not quantities
    return value


def clean_name(name: str) -> str:
    """A client's file name as a label: no directories up, no drive, no control characters. Never used as a
    path.

    Raises ``InvalidRequest`` where nothing is left or it cannot be stored as text.
    """
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"The name {name!r} is not valid Unicode.", param="name") from error
    url = name.strip()
    parts = (
        [url]
        if is_url(url)
        else [part for part in name.replace("\\", "/").split("/") if part not in {"", ".", ".."}]
    )
    cleaned = "".join(c for c in "/".join(parts) if c.isprintable()).strip()
    if not cleaned or len(cleaned) > _MAX_NAME:
        raise InvalidRequest(
            f"The name {name[:40]!r} must have 1 to {_MAX_NAME} printable characters.", param="name"
        )
    return cleaned
