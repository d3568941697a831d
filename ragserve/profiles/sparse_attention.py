"""Record of sparse attention: what a model answers under settings of sparse decoding and prefill, beside
dense attention on the same questions. `--sparse-attention auto` takes what holds, and nothing else.

The file is written to the data folder by `ragserve calibrate --part sparse`. A model's folder may bring one,
measured on another machine; the data folder's wins."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict

from ragserve.config import Settings
from ragserve.errors import InvalidRequest
from ragserve.profiles.file import ProfileFile
from ragserve.profiles.precision import as_precise
from ragserve.setting_groups.conflicts import conflict
from sglang_ext.wire import decode_fields, prefill_options

log = logging.getLogger(__name__)
FILE_NAME = "ragserve-sparse.json"
VERSION = 1
MAX_LOSS = 1.0  # points below dense, mean over a set
MAX_LOSS_BOUND = 5.0  # points that are excluded at 95 %, for all candidates together
MIN_QUESTIONS = 100  # of a set
MIN_DENSE = 20.0  # percent; where dense attention scores less, nothing can be lost
MAX_READ = 0.75  # of the context; a set that is read almost whole shows nothing
_DENSE = {"sparse_attention": "off"}
UNDER = (
    *("kv_bits", "decode_page_size", "decode_logical_page", "decode_reuse", "decode_observe"),
    *("decode_window", "prefill_observe", "prefill_dense_last"),
)
"""Settings that an entry was measured under, and that it holds for."""


@dataclass(frozen=True, slots=True)
class SparseFigures:
    """Figures of one set: scores in percent with dense attention and with the setting's, the one-sided bound
    of the loss in points, tokens of a prompt and the share of its context that was read, on average, and
    questions that ``failed`` under the setting alone.

    The cheapest of several candidates is taken by the same questions: each candidate's bound has its part of
    the 5 %, so that at 95 % all of them hold together."""

    n: int
    dense: float
    score: float
    loss_bound: float
    prompt_tokens: int
    read: float
    failed: int = 0

    @property
    def counts(self) -> bool:
        """The set can show a loss."""
        return self.dense >= MIN_DENSE and self.read <= MAX_READ

    def shortfall(self) -> str | None:
        """Give the reason why a set that counts speaks against the setting; None if it does not."""
        if self.failed:
            return f"{self.failed} questions failed that dense attention answers"
        if self.n < MIN_QUESTIONS:
            return f"{self.n} questions, fewer than {MIN_QUESTIONS}"
        loss = round(self.dense - self.score, 2)
        if loss > MAX_LOSS or self.loss_bound > MAX_LOSS_BOUND:
            return f"{loss:g} points below dense, at 95 % at most {self.loss_bound:g}"
        return None


class SparseSettings(BaseModel):
    """What a record may set of a server: its file may come with a model that was downloaded."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    decode_mode: decode_fields.Mode = "dense"
    decode_budget: decode_fields.Budget = 1
    decode_scores: decode_fields.Scores = "auto"
    prefill_mode: prefill_options.PrefillMode = "dense"
    prefill_alpha: prefill_options.Alpha = 1.0


def _only_sparse(given: dict[str, Any]) -> dict[str, Any]:
    return SparseSettings.model_validate(given).model_dump(exclude_unset=True)


@dataclass(frozen=True, slots=True)
class SparseEntry:
    """Settings of a server that replace dense attention, of `SparseSettings`, and what they cost on each
    set."""

    settings: Annotated[dict[str, Any], AfterValidator(_only_sparse)]
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
        counted = {name: each for name, each in self.sets.items() if each.counts or each.failed}
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

    def best(self, usable: Callable[[SparseEntry], bool] = lambda entry: True) -> SparseEntry | None:
        """The settings that hold, of those that are ``usable``; of several the ones that change most, then
        those that read least."""
        holding = [entry for entry in self.entries if not entry.shortfalls() and usable(entry)]
        return min(holding, key=lambda entry: (-len(entry.settings), entry.read), default=None)


SPARSE: ProfileFile[SparseRecord] = ProfileFile(
    VERSION, "record of sparse attention", "ragserve calibrate --part sparse", SparseRecord
)


def under(settings: Settings) -> dict[str, Any]:
    """Those of `UNDER` that a server has."""
    return {name: getattr(settings, name) for name in UNDER}


def chosen(
    settings: Settings,
    fingerprint: str,
    dtype: str,
    prefill_off: Callable[[Settings], str | None] = lambda settings: None,
) -> tuple[Mapping[str, Any], str]:
    """Resolve `--sparse-attention auto`: settings to replace, and why, in words. A file that is no record, or
    one that was measured otherwise, leaves the choice to the next place, and says so.

    ``dtype``: as `EngineInfo` has it. ``prefill_off``: why a server with such settings prefills densely all
    the same; None if it does not."""
    reasons = []
    for whose, folder in (("data folder", settings.data_dir), ("model", Path(settings.model))):
        try:
            record = SPARSE.load(folder / FILE_NAME, fingerprint)
        except (InvalidRequest, OSError) as error:
            log.warning("%s", error)  # with the path, which clients need not know
            reasons.append(
                f"{FILE_NAME} of the {whose} is no {SPARSE.what} that can be read; the log says why"
            )
            continue
        if record is None:
            continue
        if reason := _unlike(record, settings, dtype):
            reasons.append(reason)
            continue
        return _of(record, settings, prefill_off)
    why = "; ".join(reasons) or "nothing is recorded of this model"
    return _DENSE, f"dense: {why}; measure it with {SPARSE.command}"


def _unlike(record: SparseRecord, settings: Settings, dtype: str) -> str | None:
    """What a record was measured under that the settings do not have; None if there is nothing."""
    here = under(settings)
    differing = [name for name in sorted({*here, *record.under}) if here.get(name) != record.under.get(name)]
    if differing:
        return f"the record is of another {', '.join(differing)}"
    if not as_precise(record.dtype, dtype):
        return f"the record was measured in {record.dtype}, and this engine computes in {dtype}"
    return None


def _of(
    record: SparseRecord, settings: Settings, prefill_off: Callable[[Settings], str | None]
) -> tuple[Mapping[str, Any], str]:
    def served(entry: SparseEntry) -> dict[str, Any]:
        return {"sparse_attention": "on", "decode_mode": "dense"} | entry.settings

    def problem(entry: SparseEntry) -> str | None:
        there = settings.model_copy(update=served(entry))
        if found := conflict(there):
            return found
        off = prefill_off(there) if there.prefill_mode != "dense" else None
        return f"sparse prefill would be off: {off}" if off else None

    holding = record.best()
    if holding is None:
        return _DENSE, f"dense: none of the {len(record.entries)} settings measured for this model holds"
    best = record.best(lambda entry: problem(entry) is None)
    if best is None:
        return _DENSE, f"dense: {holding.label} holds, but {problem(holding)}"
    sets = ", ".join(
        f"{name} ({each.n}, at 95 % at most {each.loss_bound:g})"
        for name, each in best.sets.items()
        if each.counts
    )
    why = f"{best.label}, within {MAX_LOSS:g} point of dense on {sets}, {record.date}"
    return served(best), why if best is holding else f"{why}; not {holding.label}: {problem(holding)}"
