"""The parsing process: reads a file, hashes it, parses it and cuts it into chunks. Nothing here may import
torch or SGLang.

It reads one JSON request per line from stdin and writes one JSON reply per line to its original stdout. It
speaks JSON and not pickle, because a parser that a hostile file took over could otherwise run code in the
parent. `parse_process` is the parent's side, with the time limit and restarts.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import resource
import stat
import sys
import tempfile
from types import ModuleType
from typing import IO, TYPE_CHECKING, Any

from ragserve.children import end_with_parent
from ragserve.errors import RagserveError, TooLarge

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ragserve.ingest.parsers.base import Attachment
    from ragserve_index.types import NewChunk

_NAMED = 20  # chunks that a note names


def main() -> None:
    """Serve requests until stdin ends. The first line of stdin configures the process.

    The process ends with the one that the first argument names, even while it parses.
    """
    if len(sys.argv) > 1:
        end_with_parent(int(sys.argv[1]))
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints must not look like a reply
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    _Worker(json.loads(requests.readline())).serve(requests, replies)


class _Unused(ModuleType):
    """Stands for a module from which names are imported and never used."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _NotStored(Exception):
    """Internal: the disk for temporary files took no attachment. Made with what its OSError is made of."""


class _Worker:
    def __init__(self, config: dict[str, Any]) -> None:
        limit = int(config["memory_bytes"])
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # chonkie imports them for chunkers that call a remote model or service: 4/5 of this start-up
        sys.modules["openai"] = None  # type: ignore[assignment]
        sys.modules["chonkie.cloud"] = _Unused("chonkie.cloud")
        from ragserve.ingest.chunking import Chunker
        from ragserve.ingest.tokenizer import Counter, TokenizerSource

        count = Counter(TokenizerSource(config["tokenizer_json"], ""))
        self._chunker = Chunker(count, int(config["chunk_tokens"]))
        self._chunk_tokens = int(config["chunk_tokens"])
        self._max_bytes = int(config["max_bytes"])
        self._attachments = str(config["attachments"])
        self._memory_mib = limit >> 20
        self._ocr = bool(config["ocr"])
        self._hidden, self._comments = bool(config["hidden"]), bool(config["comments"])
        threads = (os.cpu_count() or 1) if self._ocr else 2  # docling computes in several
        self._cpu_seconds = int(config["timeout_s"]) * threads + 60

    def serve(self, requests: IO[str], replies: IO[str]) -> None:
        _reply(replies, {"ready": True})
        for line in requests:
            # if the parent was killed and a hostile file hangs this process, the kernel ends it
            spent = resource.getrusage(resource.RUSAGE_SELF)
            deadline = int(spent.ru_utime + spent.ru_stime) + self._cpu_seconds
            resource.setrlimit(resource.RLIMIT_CPU, (deadline, resource.getrlimit(resource.RLIMIT_CPU)[1]))
            _reply(replies, self._answer(json.loads(line)))

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._document(request)
        except _NotStored as error:
            return {"not_stored": error.args}
        except RagserveError as error:
            return {"failed": str(error), "code": error.code}
        except MemoryError:
            return {"failed": f"needs more than {self._memory_mib} MiB of memory to parse", "code": "memory"}
        except OSError as error:
            return {"failed": f"unreadable: {error.strerror or error}", "code": "unreadable"}
        except Exception as error:  # noqa: BLE001 - third-party parsers raise anything, and only this file fails
            return {"failed": f"could not be parsed: {type(error).__name__}: {error}", "code": "parse_error"}

    def _document(self, request: dict[str, Any]) -> dict[str, Any]:
        from ragserve.ingest.parsers import Raw, parse
        from ragserve.ingest.parsers.base import has_words, joined_notes, unreadable

        named = None if request.get("parser") else request["filename"]
        data = _read(request["path"], self._max_bytes, named, ocr=self._ocr)
        version = request.get("version")
        digest = version_hash(version, request["salt"]) if version else _hash(data, request["salt"])
        if digest == request.get("known_hash"):
            return {"unchanged": digest, "size": len(data)}
        origin = request["filename"], request["ext"], request.get("url"), request.get("charset")
        raw = Raw(data, *origin, hidden=self._hidden, comments=self._comments)
        parsed = parse(raw, request.get("parser"), ocr=self._ocr)
        note = parsed.note
        if parsed.cuts:
            given = self._chunker.given(parsed.text, parsed.cuts)
            every = [chunk for chunk in given if chunk.n_tokens <= self._chunk_tokens]
            note = joined_notes(note, self._too_long(given))
        else:
            running = parsed.metadata.get("page_kind", "page") == "page"
            every = self._chunker.split(parsed.text, parsed.pages, running=running)
        chunks = [chunk for chunk in every if has_words(chunk.text)]
        if not chunks:
            raise unreadable("empty", f"no text to index{f' ({note})' if note else ''}")
        if left_out := len(every) - len(chunks):
            note = joined_notes(note, f"{left_out:,} chunks without a letter or digit left out")
        attached = parsed.attachments if request.get("attachments") else ()
        return {
            "attachments": [self._stored(each) for each in attached],
            "hash": digest,
            "size": len(data),
            "mime": parsed.mime,
            "title": parsed.title[:500],
            "metadata": parsed.metadata,
            "note": note,
            "chunks": [(c.text, c.start, c.end, c.n_tokens, c.page) for c in chunks],
        }

    def _stored(self, attachment: Attachment) -> tuple[str, str, str | None]:
        """Write an attachment to a file of its own. Its name there, in the message, and its charset."""
        try:
            handle, path = tempfile.mkstemp(dir=self._attachments)
            with os.fdopen(handle, "wb") as file:
                file.write(attachment.data)
        except OSError as error:
            raise _NotStored(error.errno, error.strerror, self._attachments) from error
        return os.path.basename(path), attachment.name, attachment.charset

    def _too_long(self, chunks: Sequence[NewChunk]) -> str:
        """The note about chunks that are over the limit; empty if none is."""
        places = [place for place, chunk in enumerate(chunks) if chunk.n_tokens > self._chunk_tokens]
        named = ", ".join(map(str, places[:_NAMED])) + (", ..." if len(places) > _NAMED else "")
        most = f"{self._chunk_tokens:,} tokens (chunk_tokens)"
        said = f"{len(places):,} chunks of more than {most} left out: numbers {named}, from 0"
        return said if places else ""


def version_hash(version: str, salt: str) -> str:
    """The content hash of a file that a storage tells from its other versions by ``version``."""
    return _hash(b"version\0" + version.encode(), salt)


def _hash(data: bytes, salt: str) -> str:
    return hashlib.blake2b(data, digest_size=20, key=salt.encode()).hexdigest()


def _read(path: str, max_bytes: int, filename: str | None, *, ocr: bool) -> bytes:
    """Read a regular file; one whose beginning and ``filename`` show that it is never text is refused first,
    except for images with ``ocr``. O_NONBLOCK keeps a named pipe from hanging the open."""
    from ragserve.ingest.parsers.sniff import BEGINNING, refuse_never_text

    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        head = file.read(BEGINNING)
        if filename is not None:
            refuse_never_text(head, filename, ocr=ocr)
        data = head + file.read(max_bytes + 1 - len(head))  # the file may grow while it is read
    size = max(status.st_size, len(data))
    if size > max_bytes:
        raise TooLarge(f"too large: {size:,} bytes, the limit is {max_bytes:,} (RAGSERVE_MAX_UPLOAD_BYTES)")
    return data


def _reply(replies: IO[str], message: dict[str, Any]) -> None:
    # json's default ensure_ascii keeps lone surrogates and line separators out of the protocol
    replies.write(json.dumps(message) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
