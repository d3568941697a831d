"""Turn command-line inputs into files: each real file once, in a stable order, despite links and loops."""

from __future__ import annotations

import os
import re
import stat
import unicodedata
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from ragserve.errors import InvalidRequest
from ragserve.ingest.connectors.source_addresses import is_elsewhere, parse_address
from ragserve_index.text_forms import normal

# 007 and 1e5 stay text: they are codes, not quantities
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*|[0-9]+\.[0-9]*|\.[0-9]+)")
_BIDI = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")  # show a name as another
_MAX_NAME = 255  # characters of a client's source name


@dataclass(slots=True)
class Scan:
    """Result of a scan.

    ``sources`` holds real paths and URLs to ingest; ``failed`` and ``skipped`` hold (source, reason);
    ``roots`` and ``named`` hold the real paths of the given directories and files. Links that lead out of
    all ``folders`` are skipped; None follows them all.
    """

    sources: list[str] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    roots: list[str] = field(default_factory=list)
    named: list[str] = field(default_factory=list)
    folders: Sequence[str] | None = ()
    _seen: set[tuple[int, int]] = field(default_factory=set)  # (device, inode)
    _names: dict[str, str] = field(default_factory=dict)  # paths outside of ASCII, by their normal form

    def _is_new(self, status: os.stat_result) -> bool:
        identity = status.st_dev, status.st_ino
        new = identity not in self._seen
        self._seen.add(identity)
        return new

    def _walk(
        self, start: str, status: os.stat_result, *, root: str, recursive: bool, globs: Sequence[str]
    ) -> None:
        """Take the files below ``start`` whose path within ``root`` matches."""
        stack = [(start, status)]
        while stack:
            directory, status = stack.pop()
            if not self._is_new(status):
                continue
            below: list[tuple[str, os.stat_result]] = []
            for entry in self._entries(directory):
                path = os.path.join(directory, entry)
                status_ = self._stat(path, missing="a broken symbolic link")
                if status_ is None:
                    continue
                target = os.path.realpath(path)
                if self.folders is not None and not is_within(target, self.folders):
                    reason = f"a symbolic link to {printable(target)}, outside of the folder"
                    self.skipped.append((printable(path), f"{reason} (--follow-symlinks takes it)"))
                elif stat.S_ISDIR(status_.st_mode):
                    if recursive:
                        below.append((path, status_))
                elif not matches(os.path.relpath(path, root), globs):
                    continue
                elif stat.S_ISREG(status_.st_mode):
                    self._take(target, status_)
                else:
                    self.skipped.append((printable(path), "not a regular file"))
            stack.extend(reversed(below))

    def _entries(self, directory: str) -> list[str]:
        try:
            return sorted(name for name in os.listdir(directory) if not name.startswith("."))
        except OSError as error:
            self.failed.append((printable(directory), f"unreadable directory: {error.strerror}"))
            return []

    def _stat(self, path: str, *, missing: str) -> os.stat_result | None:
        try:
            return os.stat(path)
        except FileNotFoundError:
            self.failed.append((printable(path), missing))
        except OSError as error:  # ELOOP: a link to itself; EACCES; ENAMETOOLONG
            self.failed.append((printable(path), f"unreadable: {error.strerror}"))
        return None

    def _take(self, path: str, status: os.stat_result) -> None:
        if not self._is_new(status):
            return
        if printable(path) != path:
            self.failed.append((printable(path), "its name is not UTF-8 (rename it)"))
        elif not path.isascii() and self._names.setdefault(normal(path), path) != path:
            reason = "its name differs from another's only in the Unicode form of accents (rename one)"
            self.failed.append((path, reason))
        else:
            self.sources.append(path)


def is_url(text: str) -> bool:
    """Return whether ``text`` is an http or https URL."""
    return text.lower().startswith(("http://", "https://"))


def is_path(text: str) -> bool:
    """Return whether ``text`` is a path of this machine, and no address."""
    return not is_url(text) and not is_elsewhere(text)


def why_nothing(inputs: Sequence[str], *, recursive: bool, globs: Sequence[str]) -> str:
    """Say why a scan of these inputs found no file."""
    paths = [Path(given).expanduser() for given in inputs if is_path(given)]
    folders = [path for path in paths if path.is_dir()]
    below = 0
    for folder in folders:
        with suppress(OSError):
            below += sum(entry.is_dir() and not entry.name.startswith(".") for entry in folder.iterdir())
    where = f" in {', '.join(printable(str(folder)) for folder in folders)}" if folders else ""
    matching = f" that match {', '.join(globs)}" if globs else ""
    more = f", only {below:,} {'folder' if below == 1 else 'folders'}: add --recursive to go into them"
    return f"No files found{where}{matching}{more if below and not recursive else ''}."


def scan(
    inputs: Sequence[str],
    *,
    recursive: bool = False,
    globs: Sequence[str] = (),
    exclude: Path | None = None,
    follow_symlinks: bool = False,
    within: Sequence[str] = (),
) -> Scan:
    """Find the files that ``inputs`` name.

    Directories are read one level deep, or fully with ``recursive``. Hidden entries count only if named
    themselves. A symbolic link in a directory is followed if it leads into one of the given directories or of
    ``within`` (real paths), or with ``follow_symlinks``; else it is skipped. A file or directory reached
    twice (a loop, a second link) counts once, under its real path. ``globs`` filter the files of directories,
    see `matches`: by the path within the first of ``within`` that has the directory, else within itself.
    ``exclude`` is a directory that is never entered: our own data. Addresses of folders elsewhere are taken
    in their normal form. Raises ``InvalidRequest`` for one that is wrong.
    """
    paths = [os.path.realpath(os.path.expanduser(given)) for given in inputs if is_path(given)]
    found = Scan(folders=None if follow_symlinks else [*filter(os.path.isdir, paths), *within])
    if exclude is not None and exclude.is_dir():
        found._is_new(exclude.stat())
    for given in inputs:
        if not is_path(given):
            address = str(parse_address(given)) if is_elsewhere(given) else given
            if address not in found.sources:
                found.sources.append(address)
            continue
        path = os.path.realpath(os.path.expanduser(given))
        status = found._stat(path, missing="no such file or directory")
        if status is None:
            continue
        if stat.S_ISDIR(status.st_mode):
            if path not in found.roots:
                found.roots.append(path)
            root = next((folder for folder in within if is_within(path, [folder])), path)
            found._walk(path, status, root=root, recursive=recursive, globs=globs)
        elif stat.S_ISREG(status.st_mode):
            found.named.append(path)
            found._take(path, status)
        else:
            found.failed.append((printable(path), "not a regular file"))
    return found


def is_within(path: str, folders: Sequence[str]) -> bool:
    """Return whether ``path`` is one of ``folders`` or below one. All are real paths."""
    return any(path == folder or path.startswith(os.path.join(folder, "")) for folder in folders)


def matches(relative: str, globs: Sequence[str]) -> bool:
    """Return whether a path relative to its directory matches any of ``globs``; without globs it does.

    A pattern without ``/`` is matched against the name, one with ``/`` against the whole path, where * spans
    ``/``.
    """
    name = relative.rsplit("/", 1)[-1]
    return not globs or any(fnmatchcase(relative if "/" in pattern else name, pattern) for pattern in globs)


def printable(path: str) -> str:
    """``path`` as text that can be stored and printed, with escapes for bytes that are not UTF-8."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def parse_metadata(pairs: Sequence[str]) -> dict[str, str | int | float | bool]:
    """Parse ``key=value`` options. Booleans and numbers are converted, so that range filters work on them.

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
    if _NUMBER.fullmatch(value):
        return float(value) if "." in value else int(value)
    return value


def clean_name(name: str) -> str:
    """Clean a client's file name: no ``..``, no backslashes, no control characters, in the form in which
    names are compared. It is a label, never a path.

    Raises ``InvalidRequest`` if nothing is left or it cannot be stored as text.
    """
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"The name {name!r} is not valid Unicode.", param="name") from error
    cleaned = name.strip()
    if not is_url(cleaned):
        parts = name.replace("\\", "/").split("/")
        cleaned = "/".join(part for part in parts if part not in {"", ".", ".."})
    cleaned = normal("".join(c for c in cleaned if not _is_control(c)).strip())
    if not any(c.isprintable() for c in cleaned) or len(cleaned) > _MAX_NAME:
        message = f"The name {name[:40]!r} must have 1 to {_MAX_NAME} printable characters."
        raise InvalidRequest(message, param="name")
    return cleaned


def _is_control(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Zl", "Zp") or character in _BIDI
