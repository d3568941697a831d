"""A folder of a git repository, by the program `git`: shallow, without hooks, submodules or a work tree, and
without the files that have not changed where the repository's server can leave them out."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from ragserve.children import end_with_parent
from ragserve.errors import NotFound, TooLarge, Unavailable, UnsupportedDocument
from ragserve.ingest.connectors.base import Limits, RemoteFile, RemoteFolder, write_blocks
from ragserve.ingest.connectors.source_addresses import GitAddress
from ragserve.ingest.parsers.base import one_line

_ASK_S, _FETCH_S = 60.0, 1800.0
_POLL_S, _MEASURE_S = 0.05, 0.5
_BATCH = 500  # files brought by one fetch
_SECRET = re.compile(r"://[^/\s']{1,400}@")
_REDIRECTED = re.compile(r"error: 30[1-8]")
_REF = "refs/ragserve/head"
_LFS = b"version https://git-lfs.github.com/spec/"
_KINDS = {b"160000": "submodules", b"120000": "symbolic links"}
_BLOCK = 1 << 18  # bytes
_OPTIONS = {
    "core.hooksPath": os.devnull,
    "core.fsmonitor": "false",
    "core.askPass": "",
    "credential.interactive": "false",
    "fetch.recurseSubmodules": "false",
    "fetch.negotiationAlgorithm": "noop",
    "gc.auto": "0",
    "maintenance.auto": "false",
    "http.followRedirects": "false",
    "http.lowSpeedLimit": "1000",
    "http.lowSpeedTime": "30",
    "init.defaultBranch": "main",
}
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_OF_THE_SERVER = re.compile("remote(?: error)?:")
_KEPT = ("GIT_SSH", "GIT_SSL_", "GIT_CONFIG", "GIT_HTTP_", "GIT_EXEC_PATH", "GIT_PROXY_")


class GitFolder(RemoteFolder):
    """The files below an address.

    Args:
        where: An empty folder for the clone, which the caller removes.
        should_stop: Ends the program (``Unavailable``).
    """

    def __init__(
        self, address: GitAddress, where: Path, limits: Limits, should_stop: Callable[[], bool]
    ) -> None:
        self._address = address
        self._where = where
        self._limits = limits
        self._should_stop = should_stop
        self._expected: list[str] = []
        self._brought: set[str] = set()

    def files(self) -> Iterator[RemoteFile]:
        """Raises ``NotFound`` without the branch or the folder, and for an empty one."""
        self._clone()
        listing = self._where / "listing"
        with open(listing, "wb") as out:
            treeish = f"{_REF}:{self._address.folder}" if self._address.folder else _REF
            self._git(
                "ls-tree", "-r", "-z", treeish, stdout=out, missing=f"no folder {self._address.folder!r}"
            )
        n = 0
        for entry in _records(listing):
            n += 1
            if n > self._limits.files:
                limit = f"{self._limits.files:,} files (RAGSERVE_SOURCE_FILES)"
                raise TooLarge(f"{self._address} has more than {limit}.")
            yield self._file(entry)
        if not n:
            raise NotFound(f"There is no file in {self._address}.")

    def expect(self, files: list[RemoteFile]) -> None:
        self._expected = list(dict.fromkeys(file.version for file in files))

    def fetch(self, file: RemoteFile, path: Path) -> str:
        self._bring(file.version)
        command = self._command("cat-file", "blob", file.version)
        with open(self._where / "errors", "w+b") as errors:
            process = self._start(command, stdout=subprocess.PIPE, stderr=errors)
            try:
                out = process.stdout
                if out is None:
                    raise Unavailable("git has no output")
                blocks = iter(lambda: out.read(_BLOCK), b"")
                write_blocks(
                    _no_pointer(blocks), path, file.name.rpartition("/")[2], self._limits, self._check
                )
                if process.wait():
                    why = self._why(errors.fileno())
                    raise Unavailable(f"git cat-file: {why}", code="git_error")
            finally:
                _kill(process)
        return file.version

    def _check(self) -> None:
        if self._should_stop():
            raise Unavailable("interrupted", code="interrupted")

    def _file(self, entry: bytes) -> RemoteFile:
        head, _, raw = entry.partition(b"\t")
        mode, _, version = head.split(b" ")
        name = raw.decode("utf-8", "backslashreplace")
        refused = "" if name.encode() == raw else "its name is not UTF-8 (rename it)"
        folder = f"{self._address.folder}/" if self._address.folder else ""
        source = f"{self._address.container}{folder}{name}"
        return RemoteFile(source, name, version.decode(), refused=refused, left_out=_KINDS.get(mode, ""))

    def _clone(self) -> None:
        """Bring the commit and its folders. Raises ``NotFound``, ``Unavailable``."""
        branch = self._address.branch
        named = [branch] if branch == "HEAD" else [f"refs/heads/{branch}", f"refs/tags/{branch}"]
        # First, so that all that follows is about this repository: not one that has the current directory
        self._git("init", "--quiet", "--bare", "--template=")
        found = self._git("ls-remote", "--", self._address.url, *named, time_s=_ASK_S)
        refs = {line.partition("\t")[2] for line in found.splitlines()}
        ref = next((name for name in named if name in refs), None)
        if ref is None:
            raise NotFound(f"{self._address.url} has no branch or tag {branch!r}.", code="no_branch")
        self._git("remote", "add", "--", "origin", self._address.url)
        self._fetch("--depth=1", "--no-tags", "--filter=blob:none", "origin", f"+{ref}:{_REF}")

    def _bring(self, version: str) -> None:
        """Bring the next files that are expected, from this one on."""
        if version in self._brought:
            return
        at = self._expected.index(version) if version in self._expected else len(self._expected)
        batch = self._expected[at : at + _BATCH] or [version]
        self._fetch(
            *("--no-tags", "--no-write-fetch-head", "--filter=blob:none", "--stdin", "origin"),
            wanted="".join(f"{each}\n" for each in batch),
        )
        self._brought.update(batch)

    def _fetch(self, *arguments: str, wanted: str = "") -> None:
        self._git("fetch", "--quiet", "--recurse-submodules=no", *arguments, wanted=wanted, time_s=_FETCH_S)

    def _command(self, *arguments: str) -> list[str]:
        options = [part for name, value in _OPTIONS.items() for part in ("-c", f"{name}={value}")]
        return ["git", *options, f"--git-dir={self._where / 'git'}", *arguments]

    def _git(
        self,
        *arguments: str,
        wanted: str = "",
        stdout: object = None,
        missing: str = "",
        time_s: float = _ASK_S,
    ) -> str:
        """Run git and return its output. Raises ``NotFound`` if it fails and ``missing`` says what for,
        else ``Unavailable`` with what it said, ``TooLarge`` once the clone takes too many bytes, and
        ``OSError`` for this machine's disk."""
        with open(self._where / "input", "w+") as given, open(self._where / "errors", "w+b") as errors:
            given.write(wanted)
            given.seek(0)
            with open(self._where / "output", "w+b") as own:
                process = self._start(
                    self._command(*arguments), stdin=given, stdout=stdout or own, stderr=errors
                )
                try:
                    self._wait(process, arguments[0], time_s)
                finally:
                    _kill(process)
                if process.returncode:
                    why = self._why(errors.fileno())
                    if missing:
                        raise NotFound(f"{self._address.url} has {missing} in {self._address.branch!r}.")
                    raise Unavailable(
                        f"git {arguments[0]} of {self._address.url}: {why}",
                        hint="Give the address that it redirects to." if _REDIRECTED.search(why) else "",
                        code="git_error",
                    )
                own.seek(0)
                return own.read(1 << 20).decode("utf-8", "replace")

    def _why(self, errors: int) -> str:
        """What git said last. Raises ``OSError`` if that is of this machine's disk."""
        why = _said(errors)
        for code in _OF_THE_DISK:
            if os.strerror(code) in why and not _OF_THE_SERVER.search(why):
                raise OSError(code, os.strerror(code), str(self._where))
        return why

    def _start(self, command: list[str], **options: object) -> subprocess.Popen[bytes]:
        parent = os.getpid()
        try:
            return subprocess.Popen(  # type: ignore[call-overload]
                command,
                **{"stdin": subprocess.DEVNULL, **options},
                env=_environment(self._address),
                start_new_session=True,
                preexec_fn=lambda: end_with_parent(parent),
            )
        except FileNotFoundError as error:
            raise Unavailable(
                "Git repositories need the program git, which is not installed.",
                hint="Install it, e.g. apt-get install git.",
                code="no_git",
            ) from error

    def _wait(self, process: subprocess.Popen[bytes], what: str, time_s: float) -> None:
        ends, measured = time.monotonic() + time_s, time.monotonic()
        while True:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_S)
                break
            self._check()
            now = time.monotonic()
            if now > ends:
                raise Unavailable(f"git {what} of {self._address.url} took longer than {time_s:g} s.")
            if now - measured > _MEASURE_S:
                self._measure()
                measured = now
        self._measure()

    def _measure(self) -> None:
        if _bytes_in(self._where) > self._limits.all_bytes:
            limit = f"{self._limits.all_bytes:,} bytes (RAGSERVE_SOURCE_BYTES)"
            raise TooLarge(f"The files of {self._address} to bring take more than {limit}.")


def _environment(address: GitAddress) -> dict[str, str]:
    """The user's own, by which git finds credentials, but for what points it to another repository."""
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("GIT_") or name.startswith(_KEPT)
    }
    own.setdefault("GIT_SSH_COMMAND", "ssh -oBatchMode=yes")
    return own | {
        "GIT_ALLOW_PROTOCOL": ":".join({address.url.partition("://")[0], "https", "ssh"}),
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_LFS_SKIP_SMUDGE": "1",
        "SSH_ASKPASS": "",
        "LC_ALL": "C",
    }


def _records(path: Path) -> Iterator[bytes]:
    """The records of a file, each of which ends with NUL."""
    rest = b""
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            *whole, rest = (rest + block).split(b"\0")
            yield from whole


def _no_pointer(blocks: Iterator[bytes]) -> Iterator[bytes]:
    for block in blocks:
        if block.startswith(_LFS):
            raise UnsupportedDocument("a pointer of Git LFS: the file itself is not in the repository")
        yield block
        break
    yield from blocks


def _said(errors: int) -> str:
    """What git said last, without the secrets that a rewritten URL may have."""
    os.lseek(errors, 0, os.SEEK_SET)
    text = os.read(errors, 1 << 16).decode("utf-8", "replace")
    lines = [line for line in text.splitlines() if line.startswith(("fatal:", "error:", "ERROR"))]
    return _SECRET.sub("://***@", one_line("; ".join(lines) or text))[:500]


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _bytes_in(folder: Path) -> int:
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # git renames what is complete
                total += os.stat(os.path.join(path, name)).st_size
    return total
