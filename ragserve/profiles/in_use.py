"""What answered requests showed of a strategy in a namespace: how often its answers differ from those of full
prefill, and how often they stand in no passage although full prefill's do, kept in the data folder.

When a strategy was verified both rates were recorded. In use a strategy is taken out of ``auto`` where one
has risen: where the answers since some moment, whichever, are so much likelier under a higher rate that
without a change it takes `ALARM` answers on average until they look so.

The statistic is that of Shiryaev and Roberts (Pollak, Optimal detection of a change in distribution, 1985),

    R = (1 + R before) * likelihood of the answer at the higher rate / likelihood at the recorded one,

for a mixture of higher rates of both kinds. R less the number of answers is a martingale while the rates are
the recorded ones, whatever one kind says of the other, so the mean number of answers until R reaches `ALARM`
is no less than that, whenever one looks."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from ragserve.config import Settings
from ragserve.errors import InvalidRequest
from ragserve.profiles.file import ProfileFile, changed_at
from ragserve.profiles.retriever_name import retriever_of

log = logging.getLogger(__name__)
FILE_NAME = "ragserve-in-use.json"
VERSION = 2
ALARM = 20_000.0
UNKNOWN = (0.1, 100)  # the rate recorded, and over how many answers, where it was not measured
LOWEST, _HIGHEST = 0.02, 0.9  # of rates: no single answer may show a change
UNSUPPORTED = 0.25  # weight of unsupported answers, most of which differ as well


def recorded_rate(different: float, answers: int) -> float:
    """The rate to hold answers in use against: the share that differed of so many, and half its standard
    error, as it is an estimate."""
    share = (different * answers + 1) / (answers + 2)
    return min(max(share + 0.5 * math.sqrt(share * (1 - share) / (answers + 2)), LOWEST), _HIGHEST)


def higher_rates(rate: float) -> tuple[float, ...]:
    """The rates to which it may have risen."""
    return tuple(min(each, (1 + rate) / 2) for each in (1.8 * rate, rate + 0.1, rate + 0.35))


@dataclass(frozen=True, slots=True)
class RecordedRates:
    """The shares of answers that differed, and that were unsupported, when a strategy was verified, and of
    how many answers; None where that was not measured."""

    different: tuple[float, int] | None = None
    unsupported: tuple[float, int] | None = None

    @classmethod
    def of(cls, answers: int, different: float | None, unsupported: float | None) -> RecordedRates:
        """Of percentages."""
        shares = (None if each is None else (each / 100, answers) for each in (different, unsupported))
        return cls(*shares)


@dataclass(frozen=True, slots=True)
class InUse:
    """``rate``: `recorded_rate`; ``statistics``: R for each of its `higher_rates`; both again of unsupported
    answers. ``engine``: precision, samkv profile and prefix of the engine. ``out``: taken out of ``auto``.
    ``retriever``: what brings the passages of queries; empty in earlier records, which count for any.
    ``out_at``: when it was last taken out, Unix seconds; 0 where it never was; None where that is not known.
    What an earlier version took out has 0. ``made_at``: when the namespace was made, Unix seconds; 0 in
    earlier records."""

    engine: str
    rate: float = 0.0
    statistics: tuple[float, ...] = ()
    compared: int = 0
    different: int = 0
    out: bool = False
    unsupported_rate: float = 0.0
    unsupported_statistics: tuple[float, ...] = ()
    unsupported: int = 0
    retriever: str = ""
    out_at: float | None = 0.0
    made_at: float = 0.0

    def with_answer(
        self, different: bool, unsupported: bool = False, recorded: RecordedRates = RecordedRates()
    ) -> InUse:
        """Add an answer. What was taken out once stays out; another recorded rate begins anew."""
        rate, found = _moved(self.rate, self.statistics, recorded.different, different)
        own_rate, own = _moved(
            self.unsupported_rate, self.unsupported_statistics, recorded.unsupported, unsupported
        )
        after = replace(
            self,
            rate=rate,
            statistics=found,
            compared=self.compared + 1,
            different=self.different + bool(different),
            unsupported_rate=own_rate,
            unsupported_statistics=own,
            unsupported=self.unsupported + bool(unsupported),
        )
        return replace(after, out=self.out or after.risen >= ALARM)

    def is_like(self, new: InUse) -> bool:
        """Return whether it was found with the engine and the retriever of a ``new`` one."""
        return self.engine == new.engine and self.retriever in ("", new.retriever)

    @property
    def risen(self) -> float:
        """The statistic of both kinds."""
        each = [_mean(self.statistics), _mean(self.unsupported_statistics)]
        return (1 - UNSUPPORTED) * each[0] + UNSUPPORTED * each[1]

    @property
    def figures(self) -> dict[str, Any]:
        """How many were compared, and of them the percent that differ and that are unsupported, as `/info`
        shows them; and the rates against which these are held, None where they were not measured."""
        return {
            "compared": self.compared,
            "different": self._percent(self.different),
            "recorded": _known(self.rate),
            "unsupported": self._percent(self.unsupported),
            "unsupported_recorded": _known(self.unsupported_rate),
            "taken_out": self.out,
        }

    def _percent(self, count: int) -> float:
        return round(100 * count / self.compared, 2) if self.compared else 0.0


def _known(rate: float) -> float | None:
    return None if rate in (0.0, recorded_rate(*UNKNOWN)) else round(100 * rate, 2)


def _mean(values: tuple[float, ...]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def _moved(
    rate_before: float, before: tuple[float, ...], recorded: tuple[float, int] | None, happened: bool
) -> tuple[float, tuple[float, ...]]:
    """The rate to hold against, and R for each higher one after an answer."""
    rate = recorded_rate(*(recorded or UNKNOWN))
    rates = higher_rates(rate)
    known = before if rate == rate_before else (0.0,) * len(rates)
    found = tuple(
        (1 + r) * (higher / rate if happened else (1 - higher) / (1 - rate))
        for r, higher in zip(known, rates, strict=True)
    )
    return rate, found


class InUseRecord:
    """Reads and writes the file of one engine's model, and reads it again when it changes."""

    def __init__(
        self,
        place: Path,
        fingerprint: str,
        *,
        dtype: str,
        samkv: str,
        prefix: str = "",
        retriever: str | Callable[[str], str] = "",
    ) -> None:
        """``retriever``: what brings the passages of queries (`retriever_of`), by namespace where it is not
        one for all. The other arguments after ``place`` are `EngineInfo`'s."""
        self._place = place
        self._fingerprint = fingerprint
        self._engine = " ".join(filter(None, (dtype, samkv, prefix)))
        self._retriever = retriever
        self._stamp = 0
        self._known: dict[str, dict[str, InUse]] = {}

    @classmethod
    def of(
        cls,
        settings: Settings,
        usual: Callable[[str], Settings] | None = None,
        /,
        *,
        fingerprint: str,
        dtype: str,
        samkv: str,
        prefix: str,
        **_: str,
    ) -> InUseRecord:
        """The record in the data folder. ``usual`` as in `Gate.of`; the other arguments are
        `EngineInfo.gate_identity`."""
        retriever = (lambda name: retriever_of(usual(name))) if usual else retriever_of(settings)
        about = {"dtype": dtype, "samkv": samkv, "prefix": prefix}
        return cls(settings.data_dir / FILE_NAME, fingerprint, **about, retriever=retriever)

    def entries(self) -> Mapping[str, Mapping[str, InUse]]:
        """Estimates by namespace and strategy, of engines and searches like this one's. A file that cannot be
        read is logged and ignored."""
        return {name: self._own(name) for name in self._entries()}

    def _own(self, namespace: str, retriever: str | None = None) -> dict[str, InUse]:
        """Those of one namespace, with passages of its ``retriever``."""
        own = self._entries().get(namespace)
        if not own:
            return {}
        new = self._new(namespace, retriever)
        return {label: one for label, one in own.items() if one.is_like(new)}

    def _new(self, namespace: str, retriever: str | None = None) -> InUse:
        if retriever is None:
            known = self._retriever
            retriever = known if isinstance(known, str) else known(namespace)
        return InUse(self._engine, retriever=retriever)

    def _entries(self) -> Mapping[str, Mapping[str, InUse]]:
        stamp = changed_at(self._place)
        if stamp != self._stamp:
            try:
                found = _FILE.load(self._place, self._fingerprint) or {}
            except (OSError, InvalidRequest) as error:
                log.warning("%s is not used: %s", self._place, error)
                if isinstance(error, OSError):
                    return self._known  # and read again: a process may be short of descriptors
                found = {}
            self._known = found
            self._stamp = stamp
        return self._known

    def taken_out(self, namespace: str, retriever: str | None = None) -> set[str]:
        """The strategies that ``auto`` does not take in a namespace. ``retriever``: what brings its passages,
        where that is known."""
        return {label for label, one in self._own(namespace, retriever).items() if one.out}

    def out_at(self, namespace: str) -> dict[str, float | None]:
        """When strategies were last taken out in a namespace, Unix seconds, those that came back since among
        them; None where that is not known. Comparisons from before say nothing of them."""
        own = self._own(namespace)
        return {label: one.out_at or None for label, one in own.items() if one.out or one.out_at != 0.0}

    def add(
        self,
        namespace: str,
        label: str,
        different: bool,
        unsupported: bool = False,
        recorded: RecordedRates = RecordedRates(),
        *,
        made_at: Mapping[str, float],
    ) -> InUse:
        """Add an answer, as `InUse.with_answer`, and return what is known; durable. ``made_at``: when each
        namespace was made, Unix seconds; others are dropped, and one that was made again begins anew."""
        new = begun = self._new(namespace)
        made = made_at.get(namespace, 0.0)

        def change(known: dict[str, Any]) -> dict[str, Any]:
            nonlocal new
            spaces = {name: own for name, own in known.items() if name in made_at}
            own = spaces.pop(namespace, {})
            before = _ENTRY.validate_python(own[label]) if label in own else begun
            same = before.is_like(begun) and before.made_at in (0.0, made)
            earlier = before if same else begun
            new = replace(earlier.with_answer(different, unsupported, recorded), made_at=made)
            if new.out and not earlier.out:
                new = replace(new, out_at=round(time.time(), 3))
            own[label] = _ENTRY.dump_python(new, mode="json")
            return spaces | {namespace: own}  # the latest is the last

        _FILE.update(self._place, self._fingerprint, change)
        return new

    def clear(self, namespace: str, labels: Sequence[str]) -> None:
        """Let ``auto`` take those of the strategies again that were taken out in a namespace. What use showed
        of them is forgotten, but for when that was. Others go on."""
        out = {label for label in self.taken_out(namespace) if label in labels}
        if not out:
            return
        since, new = self.out_at(namespace), self._new(namespace)

        def change(known: dict[str, Any]) -> dict[str, Any]:
            own = dict(known.get(namespace, {}))
            for label in out & own.keys():
                made = own[label].get("made_at", 0.0)
                again = replace(new, out_at=since[label], made_at=made)
                own[label] = _ENTRY.dump_python(again, mode="json")
            return known | {namespace: own}

        _FILE.update(self._place, self._fingerprint, change)


def made_at(place: Path) -> dict[str, set[float]]:
    """By namespace, what records of any model say of when it was made, in Unix seconds; 0 in those of earlier
    versions. Raises OSError, InvalidRequest for a foreign file."""
    found: dict[str, set[float]] = {}
    for fingerprint in _FILE.models(place):
        for namespace, own in (_FILE.load(place, fingerprint) or {}).items():
            found.setdefault(namespace, set()).update(one.made_at for one in own.values())
    return found


def forget(place: Path, namespace: str) -> None:
    """Remove what use has shown in a namespace, of all models."""
    for fingerprint in _FILE.models(place):
        if namespace in (_FILE.load(place, fingerprint) or {}):
            _FILE.update(place, fingerprint, lambda own: {n: one for n, one in own.items() if n != namespace})


_ENTRY = TypeAdapter(InUse)
# what version 1 had taken out stays out
_FILE: ProfileFile[dict[str, dict[str, InUse]]] = ProfileFile(
    VERSION, "record of use", "ragserve tune", dict[str, dict[str, InUse]], reads=(1,)
)
