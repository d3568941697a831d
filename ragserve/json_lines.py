"""Read JSON Lines files."""

from __future__ import annotations

import gzip
import json
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ragserve.errors import InvalidRequest

_OPEN: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}


def json_lines(path: Path, hint: str = "") -> Iterator[tuple[int, Any]]:
    """Yield (line number, value) for each line of a file that is plain, .gz or .xz; empty lines are skipped.

    Raises InvalidRequest with file, line and reason; ``hint`` says what the file should be."""
    try:
        with _OPEN.get(path.suffix, open)(path, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"{path}, line {number}: not JSON ({error.msg}).", hint=hint) from error
    except FileNotFoundError as error:
        raise InvalidRequest(f"{path} does not exist.", hint=hint) from error
    except (OSError, EOFError, zlib.error, lzma.LZMAError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} cannot be read: {error}", hint=hint) from error
