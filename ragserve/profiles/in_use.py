"""What answered requests showed of a strategy in a namespace: the running estimate of its distance from full
prefill, kept in the data folder.

The estimate is of the latest answers that an idle server compared. A strategy is taken out of ``auto`` where
they show, at 95 %, that its loss is above the gate's limits without labels: the *lower* bound of KL above
`MAX_ANSWER_KL`, or that of the regret above `MAX_REGRET`. The gate's own bounds are on the other side; a few
answers never come under them, however good the strategy is."""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from ragserve.errors import InvalidRequest
from ragserve.profiles.bounds import lower_bound, upper_bound, upper_bound_at_all_times
from ragserve.profiles.file import ProfileFile
from ragserve.profiles.gate import MAX_ANSWER_KL, MAX_REGRET

log = logging.getLogger(__name__)
FILE_NAME = "ragserve-in-use.json"
VERSION = 1
LATEST = 256  # answers of a strategy and namespace that count


@dataclass(frozen=True, slots=True)
class InUse:
    """``kls``: nats a token; ``lost``: the regret, a share; of the latest `LATEST` answers of ``compared``.
    ``engine``: precision, samkv profile and prefix of the engine. ``out``: taken out of ``auto``."""

    engine: str
    kls: tuple[float, ...] = ()
    lost: tuple[float, ...] = ()
    compared: int = 0
    out: bool = False

    def with_answer(self, kl: float, regret: float) -> InUse:
        """Add an answer. What was taken out once stays out."""
        kls, regrets = (*self.kls, round(kl, 6))[-LATEST:], (*self.lost, round(regret, 6))[-LATEST:]
        beyond = lower_bound(kls) > MAX_ANSWER_KL or 100 * lower_bound(regrets) > MAX_REGRET
        return InUse(self.engine, kls, regrets, self.compared + 1, self.out or beyond)

    @property
    def figures(self) -> dict[str, Any]:
        """Means and both bounds over at least one answer, in nats and percent a token, as `/info` shows
        them."""
        found = {
            "kl": fmean(self.kls),
            "kl_at_least": lower_bound(self.kls),
            "kl_at_most": upper_bound(self.kls, max(self.kls)),
            "regret": 100 * fmean(self.lost),
            "regret_at_least": 100 * lower_bound(self.lost),
            "regret_at_most": 100 * upper_bound_at_all_times(self.lost),
        }
        shown = {name: float(f"{value:.3g}") for name, value in found.items()}
        return {"compared": self.compared, **shown, "taken_out": self.out}


class InUseRecord:
    """Reads and writes the file of one engine's model, and reads it again when it changes."""

    def __init__(self, place: Path, fingerprint: str, *, dtype: str, samkv: str, prefix: str = "") -> None:
        """The arguments after ``place`` are `EngineInfo`'s."""
        self._place = place
        self._fingerprint = fingerprint
        self._engine = " ".join(filter(None, (dtype, samkv, prefix)))
        self._stamp = 0
        self._known: dict[str, dict[str, InUse]] = {}

    def entries(self) -> Mapping[str, Mapping[str, InUse]]:
        """Estimates by namespace and strategy, of engines like this one. A file that cannot be read is logged
        and ignored."""
        stamp = self._place.stat().st_mtime_ns if self._place.exists() else 0
        if stamp != self._stamp:
            try:
                found = _FILE.load(self._place, self._fingerprint) or {}
            except (OSError, InvalidRequest) as error:
                log.warning("%s is not used: %s", self._place, error)
                if isinstance(error, OSError):
                    return self._known  # and read again: a process may be short of descriptors
                found = {}
            self._known = {
                namespace: {label: one for label, one in own.items() if one.engine == self._engine}
                for namespace, own in found.items()
            }
            self._stamp = stamp
        return self._known

    def taken_out(self, namespace: str) -> set[str]:
        """The strategies that ``auto`` does not take in a namespace."""
        return {label for label, one in self.entries().get(namespace, {}).items() if one.out}

    def add(self, namespace: str, label: str, kl: float, regret: float, *, existing: Container[str]) -> InUse:
        """Add an answer and return the estimate; durable. Drops namespaces that are not ``existing``."""
        new = InUse(self._engine)

        def change(known: dict[str, Any]) -> dict[str, Any]:
            nonlocal new
            spaces = {name: own for name, own in known.items() if name in existing}
            own = spaces.pop(namespace, {})
            before = InUse(**own[label]) if label in own else new
            new = (before if before.engine == self._engine else new).with_answer(kl, regret)
            own[label] = _FILE.dump({"": {label: new}})[""][label]
            return spaces | {namespace: own}  # the latest is the last

        _FILE.update(self._place, self._fingerprint, change)
        return new


def clear(place: Path, fingerprint: str, namespace: str, labels: Sequence[str]) -> None:
    """Forget what use has shown of strategies in a namespace, so that ``auto`` may take them again."""
    if not place.exists():
        return

    def change(known: dict[str, Any]) -> dict[str, Any]:
        own = {label: one for label, one in known.get(namespace, {}).items() if label not in labels}
        return {name: theirs for name, theirs in known.items() if name != namespace} | (
            {namespace: own} if own else {}
        )

    _FILE.update(place, fingerprint, change)


_FILE: ProfileFile[dict[str, dict[str, InUse]]] = ProfileFile(
    VERSION, "record of use", "ragserve tune", dict[str, dict[str, InUse]]
)
