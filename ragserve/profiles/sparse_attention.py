"""Record of sparse attention: what a model answers under settings of sparse decoding and prefill, beside
dense attention on the same questions. `--sparse-attention auto` takes what holds, and nothing else.

The file is written to the data folder by `ragserve calibrate --part sparse`. A model's folder may bring one,
measured on another machine; the data folder's wins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragserve.config import Settings
from ragserve.profiles.file import ProfileFile

FILE_NAME = "ragserve-sparse.json"
VERSION = 1
MAX_LOSS = 1.0  # points below dense, mean over a set
MAX_LOSS_BOUND = 5.0  # points that are excluded at 95 %
MIN_QUESTIONS = 100  # of a set
MIN_DENSE = 20.0  # percent; where dense attention scores less, nothing can be lost
MAX_READ = 0.75  # of the context; a set that is read almost whole shows nothing
UNDER = (
    *("kv_bits", "decode_page_size", "decode_logical_page", "decode_reuse", "decode_observe"),
    *("decode_window", "decode_scores", "prefill_observe", "prefill_dense_last"),
)
"""Settings that an entry was measured under, and that it holds for."""


@dataclass(frozen=True, slots=True)
class SparseFigures:
    """Figures of one set: scores in percent with dense attention and with the setting's, the one-sided 95 %
    bound of the loss in points, tokens of a prompt and the share of its context that was read, on
    average."""

    n: int
    dense: float
    score: float
    loss_bound: float
    prompt_tokens: int
    read: float

    @property
    def counts(self) -> bool:
        """The set can show a loss."""
        return self.dense >= MIN_DENSE and self.read <= MAX_READ

    def shortfall(self) -> str | None:
        """Give the reason why a set that counts speaks against the setting; None if it does not."""
        if self.n < MIN_QUESTIONS:
            return f"{self.n} questions, fewer than {MIN_QUESTIONS}"
        loss = round(self.dense - self.score, 2)
        if loss > MAX_LOSS or self.loss_bound > MAX_LOSS_BOUND:
            return f"{loss:g} points below dense, at 95 % at most {self.loss_bound:g}"
        return None


@dataclass(frozen=True, slots=True)
class SparseEntry:
    """Settings of a server that replace dense attention, and what they cost on each set."""

    settings: dict[str, Any]
    sets: dict[str, SparseFigures]

    @property
    def label(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.settings.items())

    @property
    def read(self) -> float:
        """Share of the context that is read, mean over the sets that count."""
        counted = [each.read for each in self.sets.values() if each.counts]
        return sum(counted) / len(counted) if counted else 1.0

    def shortfalls(self) -> list[str]:
        """Reasons why these settings do not hold; none if they do."""
        counted = {name: each for name, each in self.sets.items() if each.counts}
        if not counted:
            return ["no set that dense attention answers, and of which less was read, was measured"]
        found = {name: each.shortfall() for name, each in counted.items()}
        return [f"{name}: {reason}" for name, reason in found.items() if reason]


@dataclass(frozen=True, slots=True)
class SparseRecord:
    """What was measured of a model, ``under`` the settings of `UNDER`."""

    under: dict[str, Any]
    entries: tuple[SparseEntry, ...]
    dtype: str
    model: str
    hardware: str
    date: str

    def best(self) -> SparseEntry | None:
        """The settings that hold; of several the ones that change most, then those that read least."""
        holding = [entry for entry in self.entries if not entry.shortfalls()]
        return min(holding, key=lambda entry: (-len(entry.settings), entry.read), default=None)


SPARSE: ProfileFile[SparseRecord] = ProfileFile(
    VERSION, "record of sparse attention", "ragserve calibrate --part sparse", SparseRecord
)


def under(settings: Settings) -> dict[str, Any]:
    """Those of `UNDER` that a server has."""
    return {name: getattr(settings, name) for name in UNDER}


def load(settings: Settings, fingerprint: str) -> SparseRecord | None:
    """The record of the settings' model, None if there is none. Raises InvalidRequest for a foreign file."""
    for place in (settings.data_dir / FILE_NAME, Path(settings.model) / FILE_NAME):
        found = SPARSE.load(place, fingerprint)
        if found is not None:
            return found
    return None


def chosen(settings: Settings, fingerprint: str) -> tuple[Mapping[str, Any], str]:
    """Resolve `--sparse-attention auto`: settings to replace, and why, in words.

    Raises InvalidRequest for a foreign file."""
    dense = {"sparse_attention": "off"}
    measure = f"measure it with {SPARSE.command}"
    record = load(settings, fingerprint)
    if record is None:
        return dense, f"dense: nothing is recorded of this model; {measure}"
    here = under(settings)
    if differing := sorted(name for name, value in record.under.items() if here.get(name) != value):
        return dense, f"dense: the record is of another {', '.join(differing)}; {measure}"
    best = record.best()
    if best is None:
        return dense, f"dense: none of the {len(record.entries)} settings measured for this model holds"
    sets = ", ".join(f"{name} ({each.n})" for name, each in best.sets.items() if each.counts)
    why = f"{best.label}, within {MAX_LOSS:g} point of dense on {sets}, {record.date}"
    return {"sparse_attention": "on", "decode_mode": "dense"} | best.settings, why
