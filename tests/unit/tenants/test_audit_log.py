"""The audit log: bounded, whole lines, of several writers, and no failure of the deed itself."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from ragserve.api.authentication import Authentication
from ragserve.config import load
from ragserve.rotating_log import FILES
from ragserve.tenants.audit_log import AuditLog, record_command
from ragserve.tenants.keyring import Keyring
from tests.unit.no_room import no_room


def records(folder: Path) -> list[dict[str, Any]]:
    """All records, oldest first."""
    names = [f"audit.{number}.jsonl" for number in range(FILES - 1, 0, -1)] + ["audit.jsonl"]
    texts = [(folder / "audit" / name).read_text() for name in names if (folder / "audit" / name).exists()]
    return [json.loads(line) for text in texts for line in text.splitlines()]


def test_the_log_is_bounded_and_the_oldest_goes_first(tmp_path: Path) -> None:
    log = AuditLog(tmp_path, 8 * 400)
    for number in range(100):
        log.write(what="delete", number=number)
        sizes = [path.stat().st_size for path in (tmp_path / "audit").glob("*.jsonl")]
        assert sum(sizes) <= 8 * 400
        assert len(sizes) <= FILES
    kept = [one["number"] for one in records(tmp_path)]
    assert kept == list(range(kept[0], 100))
    assert len(kept) > 35


def test_writers_do_not_mix_their_lines(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: AuditLog(tmp_path, 8 * 2000).write(number=n, text="x" * 50), range(60)))
    assert sorted(one["number"] for one in records(tmp_path)) == list(range(60))


def test_a_record_is_flushed_before_the_write_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        real(descriptor)
        flushed.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    monkeypatch.setattr(os, "fsync", fsync)
    log = AuditLog(tmp_path, 2**20)
    log.write(what="one")
    folder = tmp_path.resolve() / "audit"
    assert flushed == [str(folder / "audit.jsonl"), str(folder)]  # a new file's name, too
    log.write(what="two")
    assert flushed[2:] == [str(folder / "audit.jsonl")]


def test_a_line_torn_by_a_power_cut_spoils_no_other(tmp_path: Path) -> None:
    log = AuditLog(tmp_path, 2**20)
    log.write(what="one")
    with (tmp_path / "audit" / "audit.jsonl").open("a") as file:
        file.write('{"what": "tor')
    log.write(what="two", name='a "quoted"\nname')
    lines = (tmp_path / "audit" / "audit.jsonl").read_text().splitlines()
    assert [line.startswith('{"time"') for line in lines] == [True, False, True]
    assert json.loads(lines[2])["name"] == 'a "quoted"\nname'


def test_a_log_that_cannot_be_written_is_an_error_of_the_servers_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "audit").write_text("in the way")
    with caplog.at_level(logging.ERROR, "ragserve.tenants.audit_log"):
        AuditLog(tmp_path, 2**20).write(what="delete", document="d1")
    assert "cannot be written" in caplog.text
    assert '"document":"d1"' in caplog.text  # what should have been recorded


def test_no_bytes_keep_no_log(tmp_path: Path) -> None:
    record_command(load(data_dir=tmp_path, audit_log_bytes=0), "docs rm")
    assert not (tmp_path / "audit").exists()


def test_a_record_without_room_names_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with no_room():
        AuditLog(tmp_path, 2**20).write(what="delete", document="d1")
    assert str(tmp_path / "audit" / "audit.jsonl") in caplog.text
    AuditLog(tmp_path, 2**20).write(what="delete", document="d2")
    assert [one["document"] for one in records(tmp_path)] == ["d2"]


@pytest.mark.parametrize("ends", [asyncio.CancelledError(), ClientDisconnect(), OSError("boom"), None])
def test_no_end_of_a_request_is_flushed_in_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: BaseException | None
) -> None:
    threads, write = [], AuditLog.write

    def watched(self: AuditLog, **event: Any) -> None:
        threads.append(threading.current_thread())
        write(self, **event)

    monkeypatch.setattr(AuditLog, "write", watched)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"]["access"].allow("delete")
        if ends is not None:
            raise ends
        await send({"type": "http.response.start", "status": 204, "headers": []})

    async def receive() -> Any: ...

    async def send(message: Any) -> None: ...

    front = Authentication(app, Keyring(tmp_path, None), AuditLog(tmp_path, 2**20))
    scope = {"type": "http", "path": "/rag/documents", "method": "DELETE", "headers": []}
    with suppress(*([] if ends is None else [type(ends)])):
        asyncio.run(front(scope, receive, send))
    assert [one["what"] for one in records(tmp_path)] == ["DELETE /rag/documents"]
    assert threads != [threading.main_thread()]
