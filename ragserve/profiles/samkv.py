"""The profile of a model: what strategy `samkv` takes where a request says nothing, as `ragserve calibrate`
found it, and how it was found.

A file beside the model's weights (`place_of`), so that it goes where they go; in the data folder for a model
whose folder cannot be written or is not there (a hub id). Where both have one the data folder's counts, as
with the gate's record."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragserve.config import Settings
from ragserve.files import in_package
from ragserve.profiles.file import ProfileFile
from sglang_ext.request_options import strategy_options

log = logging.getLogger(__name__)
FILE_NAME = "ragserve-samkv.json"
VERSION = 1


@dataclass(frozen=True, slots=True)
class SamkvProfile:
    """``stable``, ``heads``, ``selection`` and ``options`` as `sglang_ext.context.selection.profile.Profile`
    has them; ``figures`` and ``probes``: what was measured and on what."""

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

    @property
    def engine(self) -> dict[str, Any]:
        """What the engine reads."""
        return {
            "stable": self.stable,
            "heads": self.heads,
            "selection": self.selection,
            "options": self.options,
        }


def _read(fields: dict[str, Any]) -> SamkvProfile:
    profile = SamkvProfile(**fields)
    for name, kind in (("stable", list), ("heads", list), ("selection", str), ("options", dict)):
        if not isinstance(getattr(profile, name), kind):
            raise TypeError(f"{name} is not a {kind.__name__}")
    for selection, options in profile.options.items():
        strategy_options("samkv", {"selection": selection, **options})
    return profile


SAMKV = ProfileFile(VERSION, "samkv profile", "ragserve calibrate --part samkv", _read)


def load(settings: Settings, fingerprint: str) -> SamkvProfile | None:
    """The one that counts for the settings' model; None, and a warning, where there are only those of other
    models.

    Raises InvalidRequest for a file that is no such profile.
    """
    beside = Path(settings.model) / FILE_NAME
    for place in (settings.data_dir / FILE_NAME, beside):
        found = SAMKV.load(place, fingerprint)
        if found is not None:
            return found
    if beside.exists():
        log.warning(
            "%s is of another model than the weights beside it (%s) and is not used: run %s",
            beside,
            fingerprint,
            SAMKV.command,
        )
    return None


def place_of(settings: Settings, fingerprint: str) -> Path:
    """Where a new one is written: beside the model if that can be, else in the data folder; there, too, where
    one would hide it.
    """
    own = settings.data_dir / FILE_NAME
    if SAMKV.load(own, fingerprint) is not None:
        return own
    folder = Path(settings.model)
    writable = folder.is_dir() and os.access(folder, os.W_OK) and not in_package(folder)
    return folder / FILE_NAME if writable else own
