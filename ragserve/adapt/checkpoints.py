"""Checkpoints of a run in its work folder: adapter, optimiser and what has happened, each whole or not there.

The folder may travel without ``optimiser.pt``: a run that finds none begins with a new one, whose learning
rate rises again."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragserve.files import naming, sync_folder, write_json

if TYPE_CHECKING:
    import torch

_LATEST = "latest.json"
CHECKPOINT = re.compile(r"checkpoint-\d+")  # names of folders
BEST = re.compile(r"best-\d+\.(?:safetensors|part)")  # of files


@dataclass(slots=True)
class TrainingCourse:
    """What a training has been through. ``seconds``: of training; ``history``: held-out KL by step."""

    step: int = 0
    seconds: float = 0.0
    skipped: int = 0
    best_step: int = 0
    stopped: str = ""
    history: list[dict[str, float]] = field(default_factory=list)


class Checkpoints:
    """The checkpoints in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self) -> tuple[TrainingCourse, dict[str, torch.Tensor], Any] | None:
        """The latest course, its adapter by name, and the optimiser's state, None without one; None before
        the first checkpoint."""
        import torch
        from safetensors.torch import load_file

        latest = self._folder / _LATEST
        if not latest.exists():
            return None
        state = json.loads(latest.read_text(encoding="utf-8"))
        place = self._folder / state.pop("folder")
        optimiser = place / "optimiser.pt"
        known = torch.load(optimiser, weights_only=True) if optimiser.exists() else None
        return TrainingCourse(**state), load_file(place / "adapter.safetensors"), known

    def save(self, course: TrainingCourse, adapter: Mapping[str, torch.Tensor], optimiser: Any) -> None:
        """Write a checkpoint; the one before it, and its best adapter, are there until this one is whole."""
        import torch

        place = self._folder / f"checkpoint-{course.step}"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        write_tensors(place / "adapter.safetensors", adapter)
        buffer = io.BytesIO()
        torch.save(optimiser, buffer)
        _write(place / "optimiser.pt", buffer.getbuffer())
        sync_folder(place)
        write_json(self._folder / _LATEST, asdict(course) | {"folder": place.name}, durable=True)
        for path in self._folder.iterdir():
            if path != place and CHECKPOINT.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
            elif path != self._best(course.best_step) and BEST.fullmatch(path.name):
                path.unlink(missing_ok=True)

    def save_best(self, adapter: Mapping[str, torch.Tensor], step: int) -> None:
        """Keep the adapter of the best held-out KL so far, that of ``step``; the one before it stays until a
        checkpoint names this one as its ``best_step``."""
        self._folder.mkdir(parents=True, exist_ok=True)
        temporary = self._folder / f"best-{step}.part"
        write_tensors(temporary, adapter)
        temporary.replace(self._best(step))

    def best(self, step: int) -> dict[str, torch.Tensor]:
        """The adapter that `save_best` kept of a step."""
        from safetensors.torch import load_file

        found: dict[str, torch.Tensor] = load_file(self._best(step))
        return found

    def _best(self, step: int) -> Path:
        return self._folder / f"best-{step}.safetensors"


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write safetensors to disk, by Python, whose errors name a full one."""
    from safetensors.torch import save

    plain = {name: each.detach().cpu().contiguous() for name, each in tensors.items()}
    _write(path, save(plain, {"format": "pt"}))


def _write(path: Path, data: bytes | memoryview) -> None:
    with naming(path), path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
