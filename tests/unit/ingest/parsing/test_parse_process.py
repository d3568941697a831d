"""Whatever a file does to the parsing process is its own failure; the next file finds a working process."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from email.message import EmailMessage
from pathlib import Path
from typing import Any

import pytest

from ragserve.errors import Unavailable
from ragserve.ingest.parsing.parse_process import Failed, ParsedFile, ParseProcess, ParseRequest, Unchanged
from ragserve.ingest.tokenizer import TokenizerSource


def request(path: Path, **known: str) -> ParseRequest:
    return ParseRequest(str(path), path.name, path.suffix, salt=known.pop("salt", "s"), **known)


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "a.txt"
    path.write_text("Whales sing.")
    return path


def process(tokenizer: TokenizerSource, **limits: float) -> ParseProcess:
    options = {"chunk_tokens": 64, "max_bytes": 2**26, "timeout_s": 30.0, **limits}
    return ParseProcess(tokenizer_json=tokenizer.json, **options)  # type: ignore[arg-type]


def test_a_hang_is_a_timeout_and_the_next_file_is_parsed(tokenizer: TokenizerSource, document: Path) -> None:
    with process(tokenizer, timeout_s=4) as parser:
        assert isinstance(parser.parse(request(document)), ParsedFile)
        first = parser.pid
        assert first is not None
        os.kill(first, signal.SIGSTOP)
        result = parser.parse(request(document))
        assert isinstance(result, Failed)
        assert (result.code, "4 s" in result.reason) == ("timeout", True)
        assert isinstance(parser.parse(request(document)), ParsedFile)
        assert parser.pid not in {None, first}
        with pytest.raises(ProcessLookupError):
            os.kill(first, 0)


def test_a_crash_is_reported_with_its_signal(tokenizer: TokenizerSource, document: Path) -> None:
    with process(tokenizer) as parser:
        parser.parse(request(document))
        pid = parser.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)  # so that the request is under way when the process dies
        threading.Timer(
            0.3, lambda: [os.kill(pid, each) for each in (signal.SIGSEGV, signal.SIGCONT)]
        ).start()
        result = parser.parse(request(document))
        assert isinstance(result, Failed)
        assert (result.code, "SIGSEGV" in result.reason) == ("crash", True)
        assert isinstance(parser.parse(request(document)), ParsedFile)


def test_a_file_that_needs_too_much_memory_fails_alone(
    tokenizer: TokenizerSource, document: Path, tmp_path: Path
) -> None:
    big = tmp_path / "big.txt"
    big.write_text("🙂 a few words. " * 3_000_000)
    with process(tokenizer, memory_bytes=450 * 2**20, timeout_s=5.0) as parser:
        result = parser.parse(request(big))
        assert isinstance(result, Failed)
        # Rust and C++ libraries abort where Python raises MemoryError; some allocators search for room until
        # the time is up.
        assert result.code in {"memory", "crash", "timeout"}
        assert isinstance(parser.parse(request(document)), ParsedFile)


def test_unchanged_files_are_hashed_not_parsed(tokenizer: TokenizerSource, document: Path) -> None:
    with process(tokenizer) as parser:
        first = parser.parse(request(document))
        assert isinstance(first, ParsedFile)
        assert parser.parse(request(document, known_hash=first.hash)) == Unchanged(first.hash, 12)
        other_settings = parser.parse(request(document, known_hash=first.hash, salt="t"))
        assert isinstance(other_settings, ParsedFile)
        document.write_text("Whales sang.")
        assert isinstance(parser.parse(request(document, known_hash=first.hash)), ParsedFile)


@pytest.mark.parametrize("kind", ["missing", "directory", "fifo"])
def test_what_is_no_readable_file_fails_with_the_reason(
    kind: str, tokenizer: TokenizerSource, tmp_path: Path, parser: ParseProcess
) -> None:
    path = tmp_path / "x.txt"
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)  # opening it the ordinary way would wait for a writer
    result = parser.parse(request(path))
    assert isinstance(result, Failed)
    assert result.code == "unreadable"


@pytest.fixture
def mail(tmp_path: Path) -> Path:
    message = EmailMessage()
    message.set_content("See the attached files.")
    for name, text in (("short.txt", "Whales."), ("long.txt", "Whales sing. " * 9)):
        message.add_attachment(text, filename=name)
    path = tmp_path / "mail.eml"
    path.write_bytes(message.as_bytes())
    return path


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_a_disk_that_takes_no_attachment_is_no_failure_of_the_file(
    tokenizer: TokenizerSource, mail: Path, temporary: Path
) -> None:
    with process(tokenizer) as parser:
        first = parser.parse(request(mail))
        assert isinstance(first, ParsedFile)
        waiting = {Path(attached.path) for attached in first.attachments}
        assert len(waiting) == 2
        pid = parser.pid
        assert pid is not None
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (20, 20))  # bytes of a file
        with pytest.raises(OSError, match="large") as caught:
            parser.parse(request(mail))
        [folder] = temporary.iterdir()
        assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(folder))
        assert set(folder.iterdir()) == waiting


def test_attachments_that_nobody_gets_are_removed(
    tokenizer: TokenizerSource, mail: Path, temporary: Path
) -> None:
    class Killed(ParseProcess):
        def _receive(self, timeout_s: float) -> dict[str, Any]:
            reply = super()._receive(timeout_s)
            if self.pid is not None and reply.get("attachments"):
                os.kill(self.pid, signal.SIGKILL)
                raise EOFError
            return reply

    options: dict[str, Any] = {"chunk_tokens": 64, "max_bytes": 2**26, "timeout_s": 30.0}
    with Killed(tokenizer_json=tokenizer.json, **options) as parser:
        assert isinstance(parser.parse(request(mail)), Failed)
        [folder] = temporary.iterdir()
        assert list(folder.iterdir()) == []


def test_after_an_interrupt_nothing_is_parsed(tokenizer: TokenizerSource, document: Path) -> None:
    with process(tokenizer) as parser:
        parser.parse(request(document))
        parser.interrupt()
        assert isinstance(parser.parse(request(document)), Failed)


def test_a_process_that_cannot_start_is_said_plainly(document: Path) -> None:
    with (
        ParseProcess(tokenizer_json="{}", chunk_tokens=64, max_bytes=100, timeout_s=5) as parser,
        pytest.raises(Unavailable, match="did not start"),
    ):
        parser.parse(request(document))


def test_the_parsing_process_loads_neither_torch_nor_sglang(tmp_path: Path) -> None:
    script = (
        "import sys, ragserve.ingest.parsing.parse_worker, ragserve.ingest.chunking\n"
        "import ragserve.ingest.parsers as p\n"
        "from importlib import import_module\n"
        "for module in p.PARSERS: import_module(f'{p.__name__}.{module}')\n"
        "import chonkie, trafilatura, docx, pypdfium2\n"
        "sys.exit(bool({'torch', 'sglang', 'transformers'} & set(sys.modules)))\n"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False, cwd=tmp_path).returncode == 0


def test_the_parsing_process_does_not_start_with_the_index(tmp_path: Path) -> None:
    """Each ingestion starts one: numpy, pydantic and the store took half of that time."""
    script = (
        "import sys, ragserve.ingest.parsing.parse_worker, ragserve.ingest.chunking\n"
        "sys.exit(bool({'numpy', 'pydantic', 'ragserve_index.store'} & set(sys.modules)))\n"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False, cwd=tmp_path).returncode == 0


def test_files_of_the_working_directory_are_not_imported(
    tokenizer: TokenizerSource, document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("tokenizers", "chonkie", "json", "ragserve"):
        (tmp_path / f"{module}.py").write_text("raise RuntimeError('this is a document, not our code')")
    monkeypatch.chdir(tmp_path)
    with process(tokenizer) as parser:
        assert isinstance(parser.parse(request(document)), ParsedFile)
