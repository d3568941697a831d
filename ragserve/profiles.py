"""Files of what was measured on this machine: JSON with a format version and an entry for every model, by its fingerprint."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragserve.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class ProfileFile:
    """One such file. ``what`` it is and the ``command`` that makes it are for its errors."""

    place: Path
    version: int
    what: str
    command: str

    def read(self, fingerprint: str) -> dict[str, Any] | None:
        """The entry of a model, None where there is none. Raises InvalidRequest for a file that is no such profile."""
        entry = self._models().get(fingerprint)
        return None if entry is None else dict(entry)

    def write(self, fingerprint: str, entry: dict[str, Any]) -> None:
        """Beside those of other models; atomic."""
        models = self._models() | {fingerprint: entry}
        self.place.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.place.with_suffix(".tmp")
        temporary.write_text(json.dumps({"version": self.version, "models": models}, indent=1) + "\n", encoding="utf-8")
        temporary.replace(self.place)

    def foreign(self, error: Exception) -> InvalidRequest:
        """What to raise for content that does not fit."""
        return InvalidRequest(f"{self.place} is not a {self.what}: {error!r}.", hint=f"Move it away and run {self.command}.")

    def _models(self) -> dict[str, Any]:
        if not self.place.exists():
            return {}
        try:
            raw = json.loads(self.place.read_text(encoding="utf-8"))
            if raw["version"] != self.version:
                raise ValueError(f"version {raw['version']}, not {self.version}")
            return dict(raw["models"])
        except (ValueError, KeyError, TypeError) as error:
            raise self.foreign(error) from error
