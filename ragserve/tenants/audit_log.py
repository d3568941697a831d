"""The audit log: who changed what, when, from where, and with which result. JSON lines in `audit/`.

A record is on disk (fsync) before its answer is sent: what a client has seen done is on record. A kill
between the deed and the record loses the record. Records of several processes do not mix."""

from __future__ import annotations

import getpass
import logging
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ragserve.config import Settings
from ragserve.errors import Unavailable
from ragserve.rotating_log import RotatingLog, line_of

FOLDER = "audit"
log = logging.getLogger(__name__)


class AuditLog:
    """Appends to `audit.jsonl` and its older files, of ``max_bytes`` in all. 0 bytes keep no log."""

    def __init__(self, data_dir: Path, max_bytes: int) -> None:
        self._log = RotatingLog(data_dir / FOLDER, "audit", max_bytes, durable=True)

    def write(self, **event: Any) -> None:
        """Append an event with its time, and flush it to disk.

        An error is logged and not raised: what is to be recorded has been done."""
        if not self._log.file_bytes:
            return
        line = line_of({"time": datetime.now(UTC).isoformat(timespec="milliseconds"), **event})
        try:
            with self._log.alone():
                self._log.append(line)
        except (OSError, Unavailable) as error:
            log.error("the audit log cannot be written (%s): %s", error, line.decode().strip())


def record_command(settings: Settings, what: str, **details: Any) -> None:
    """Record what a command did to the data folder, under the name of the system's user."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = str(os.getuid())
    AuditLog(settings.data_dir, settings.audit_log_bytes).write(
        who=f"user {user}", address="local", what=f"ragserve {what}", **details
    )
