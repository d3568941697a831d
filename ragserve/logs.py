"""Log lines, as text or as a JSON object each, which names its request."""

from __future__ import annotations

import json
import logging
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from ragserve import tracing
from ragserve.files import write_json

LogFormat = Literal["text", "json"]
REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)
ACCESS = logging.getLogger("ragserve.access")
"""A line per request; only with JSON, where ``extra`` has method, route, status and milliseconds."""
_FIELDS = ("method", "route", "status", "milliseconds")
_ENGINE_FILE = "engine-logging.json"


class JsonFormatter(logging.Formatter):
    """A line of JSON for each record: time (UTC), level, logger, process, message; request_id and trace_id
    where there are; exception with its traceback."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.process,
            "message": record.getMessage(),
            "request_id": REQUEST_ID.get(),
            "trace_id": tracing.trace_id(),
            **{name: getattr(record, name, None) for name in _FIELDS},
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        shown = {name: value for name, value in fields.items() if value is not None}
        return json.dumps(shown, ensure_ascii=False, default=str)


def configure(level: str, form: LogFormat) -> None:
    """Write the server's log to stderr."""
    handler = logging.StreamHandler()
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if form == "json" else text)
    logger = logging.getLogger("ragserve")
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False
    ACCESS.setLevel(logging.NOTSET if form == "json" else logging.WARNING)


def engine_file(folder: Path, level: str) -> Path:
    """Write the file that makes SGLang's processes log JSON at ``level``, and return its place."""
    place = folder / _ENGINE_FILE
    handler = {"class": "logging.StreamHandler", "formatter": "json"}
    config = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"json": {"()": f"{__name__}.{JsonFormatter.__name__}"}},
        "handlers": {"stderr": handler},
        "root": {"level": level.upper(), "handlers": ["stderr"]},
        "loggers": {name: {"level": "WARNING"} for name in ("httpx", "httpcore")},
    }
    write_json(place, config)
    return place
