"""The audit log: who changed what, when, from where, and with which result. JSON lines in `audit/`.

A record is on disk (fsync) before its answer is sent: what a client has seen done is on record. A kill
between the deed and the record loses the record. Records of several processes do not mix."""

from __future__ import annotations

import getpass
import json
import logging
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ragserve.config import Settings
from ragserve.errors import Unavailable
from ragserve.files import locked, sync_folder

FOLDER = "audit"
FILES = 8
log = logging.getLogger(__name__)
_WAIT_S = 5.0


class AuditLog:
    """Appends to `audit.jsonl`. Before that file exceeds an eighth of ``max_bytes`` it becomes
    `audit.1.jsonl`, and so on; the eighth goes. 0 bytes keep no log."""

    def __init__(self, data_dir: Path, max_bytes: int) -> None:
        self.folder = data_dir / FOLDER
        self._file_bytes = max_bytes // FILES

    def write(self, **event: Any) -> None:
        """Append an event with its time, and flush it to disk.

        An error is logged and not raised: what is to be recorded has been done."""
        if not self._file_bytes:
            return
        record = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), **event}
        line = json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with locked(self.folder / ".lock", wait_s=_WAIT_S) as alone:
                if not alone:
                    raise Unavailable("another process keeps the log")
                self._append(line)
        except (OSError, Unavailable) as error:
            log.error("the audit log cannot be written (%s): %s", error, line.decode().strip())

    def _append(self, line: bytes) -> None:
        current = self._path(0)
        size = current.stat().st_size if current.exists() else 0
        if size and size + len(line) > self._file_bytes:
            for number in range(FILES - 2, -1, -1):
                if self._path(number).exists():
                    self._path(number).replace(self._path(number + 1))
            size = 0
        descriptor = os.open(current, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            if size and os.pread(descriptor, 1, size - 1) != b"\n":  # torn by a power cut
                line = b"\n" + line
            os.write(descriptor, line)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if not size:
            sync_folder(self.folder)

    def _path(self, number: int) -> Path:
        return self.folder / (f"audit.{number}.jsonl" if number else "audit.jsonl")


def record_command(settings: Settings, what: str, **details: Any) -> None:
    """Record what a command did to the data folder, under the name of the system's user."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = str(os.getuid())
    AuditLog(settings.data_dir, settings.audit_log_bytes).write(
        who=f"user {user}", address="local", what=f"ragserve {what}", **details
    )
