"""Writes the adapted model: a folder like the base's with merged weights, the adapter and a record."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ragserve.adapt.low_rank import WEIGHTS, weight_bytes
from ragserve.errors import Conflict, InvalidRequest, StorageFull
from ragserve.files import write_json

RECORD = "ragserve-adapt.json"
_LEFT_OUT = (*WEIGHTS, "*.index.json", "ragserve-*.json", "README*", ".*")
"""Files of the base that say nothing of the adapted model: weights, what ragserve has found about it."""
_WRITING = "writing.json"  # in the work folder: the folder beside OUT that becomes OUT
_ROOM = 1.1  # times the base's weights, which OUT and the work folder need together


def check_out(out: Path, base: Path) -> None:
    """Raise Conflict if OUT exists, and InvalidRequest if it cannot or is in the base's folder."""
    if out.exists():
        raise Conflict(f"{out} exists already.", hint="Give another OUT, or remove it.", code="out_exists")
    parent = out.resolve().parent
    if parent.is_relative_to(base.resolve()):
        raise InvalidRequest(f"{out} is in {base}, the model's folder.", hint="Give another OUT.")
    if not parent.is_dir():
        raise InvalidRequest(f"{parent} is no folder.", hint="Make it first, or give another OUT.")


def check_room(out: Path, base: Path) -> None:
    """Raise StorageFull where the disk has no room for OUT."""
    parent = out.resolve().parent
    wanted, free = int(_ROOM * weight_bytes(base)), shutil.disk_usage(parent).free
    if free < wanted:
        raise StorageFull(
            f"{parent} has {free // 2**20:,} MiB left and the adapted model takes {wanted // 2**20:,}.",
            hint="Free some space, or give an OUT on another disk.",
        )


def write_model(out: Path, base: Path, record: dict[str, Any], work: Path) -> None:
    """Write OUT of the folders ``merged`` and ``adapter`` in ``work``; it is there whole or not at all."""
    with _becoming(out, work) as folder:
        for path in base.iterdir():
            if path.is_file() and not any(path.match(each) for each in _LEFT_OUT):
                shutil.copyfile(path, folder / path.name)
        for path in (work / "merged").iterdir():
            if any(path.match(each) for each in WEIGHTS) or path.match("*.index.json"):
                shutil.move(path, folder / path.name)
        shutil.copytree(work / "adapter", folder / "adapter", ignore=shutil.ignore_patterns("README*"))
        write_json(folder / RECORD, record, durable=True)


@contextmanager
def _becoming(out: Path, work: Path) -> Iterator[Path]:
    """A folder beside OUT that becomes OUT once the block has ended well, and vanishes otherwise. Its name is
    in the work folder before it is there."""
    folder = out.resolve().parent / f".{out.name}.{secrets.token_hex(8)}"
    write_json(work / _WRITING, {"folder": str(folder)}, durable=True)
    try:
        folder.mkdir(mode=0o700)
        yield folder
        folder.chmod(0o755)
        if out.exists():
            raise Conflict(f"{out} has come to be meanwhile.", hint="Remove it and run the command again.")
        folder.rename(out)
    finally:
        remove_unfinished(work)


def remove_unfinished(work: Path) -> None:
    """Remove what a run that was killed while it wrote has left beside OUT. Call it with the lock held."""
    place = work / _WRITING
    if place.exists():
        shutil.rmtree(json.loads(place.read_text(encoding="utf-8"))["folder"], ignore_errors=True)
        place.unlink(missing_ok=True)
