"""SamKV profile of a model: defaults of strategy `samkv`, found by `ragserve calibrate`, and how they were
found.

The file is written to the data folder. A copy beside the model's weights goes where they go, and is read by
every server without its own: the data folder's wins, as for the gate's record."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragserve.config import Settings
from ragserve.profiles.file import ProfileFile
from sglang_ext.wire.request_options import strategy_options

log = logging.getLogger(__name__)
FILE_NAME = "ragserve-samkv.json"
VERSION = 1


@dataclass(frozen=True, slots=True)
class SamkvProfile:
    """``stable``, ``heads``, ``selection`` and ``options`` as in
    `sglang_ext.context.selection.profile.Profile`; ``figures`` and ``probes``: what was measured, and on
    what."""

    stable: list[int]
    heads: list[list[int]]
    selection: str
    options: dict[str, dict[str, Any]]
    model: str
    hardware: str
    dtype: str
    date: str
    versions: dict[str, str]
    probes: dict[str, Any]
    figures: dict[str, Any]

    def __post_init__(self) -> None:
        for selection, options in self.options.items():
            strategy_options("samkv", {"selection": selection, **options})

    @property
    def engine(self) -> dict[str, Any]:
        """The part that the engine reads."""
        return {name: getattr(self, name) for name in ("stable", "heads", "selection", "options")}


SAMKV: ProfileFile[SamkvProfile] = ProfileFile(
    VERSION, "samkv profile", "ragserve calibrate --part samkv", SamkvProfile
)


def load(settings: Settings, fingerprint: str) -> SamkvProfile | None:
    """Load the profile of the settings' model; None if there is none, with a warning if the model's folder
    has only those of other weights.

    Raises InvalidRequest for a file that is no such profile."""
    beside = Path(settings.model) / FILE_NAME
    for place in (settings.data_dir / FILE_NAME, beside):
        found = SAMKV.load(place, fingerprint)
        if found is not None:
            return found
    if beside.exists():
        warning = "%s belongs to other weights than those in its folder (%s) and is not used: run %s"
        log.warning(warning, beside, fingerprint, SAMKV.command)
    return None


def place_of(settings: Settings) -> Path:
    """The place of a new profile: in the data folder. A model's folder may be others' as well."""
    return settings.data_dir / FILE_NAME
