"""The gate: which composed strategies may answer, by the record of `ragserve tune` or `eval --write-gate`.

Composed KV is approximate; how approximate depends on the model, the strategy's options and the data. So a
strategy that was not measured, or fell short of full prefill, is refused unless forced. What counts is not
the mean that was measured but its upper confidence bound (`ragserve.profiles.bounds`): a strategy passes
where too few questions would hide a loss as little as where the loss is seen. Records of versions 1 and 2
keep the rule that they were measured by until `ragserve tune` measures anew. The record is a JSON file in the
data folder; a model's folder may bring one, measured on another machine. It belongs to the model's weights
(`EngineInfo.fingerprint`) and applies to engines of the same or a finer precision: composed and full prefill
were compared in one engine, and only coarser rounding can add to the difference.

In a namespace that a strategy was measured on (`ragserve tune`) with the server's search, that measurement
alone decides. In all others question sets do: those measured here or, without any, those that the model
brings. Measurements with other searches lie beside each other."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ragserve.best_passages import NOT_COMPOSED
from ragserve.config import Settings
from ragserve.errors import InvalidRequest
from ragserve.profiles.figures import MARGIN, Figures
from ragserve.profiles.file import ProfileFile, changed_at
from ragserve.profiles.in_use import RecordedRates
from ragserve.profiles.precision import as_precise
from ragserve.profiles.retriever_name import retriever_of
from ragserve.strategy_spec import parse, without_passages

log = logging.getLogger(__name__)

FILE_NAME = "ragserve-gate.json"
VERSION = 3
LEVEL = 2.0  # points of the best score: as good
EXACT = "prefix"  # in place of a strategy: exact prefill
_MEASURED_WITH = ("dtype", "samkv", "prefix", "sparse")
_NAMESPACE = "namespace "  # begins the name of a namespace's own questions among the sets
_BY = " by "  # before what brought their passages; records of earlier versions end before it
_MOST_KEPT = 256  # namespaces whose entries are kept, with a retriever each


def set_of(namespace: str, retriever: str = "") -> str:
    """Name the set of a namespace's own questions in a record."""
    return f"{_NAMESPACE}{namespace}" + (f"{_BY}{retriever}" if retriever else "")


@dataclass(frozen=True, slots=True)
class Entry:
    """The record of one strategy with its options: figures by set, and where, when and in which precision
    they were measured."""

    sets: Mapping[str, Figures]
    model: str
    date: str
    hardware: str
    dtype: str
    versions: Mapping[str, str] = field(default_factory=dict)
    samkv: str = ""  # digest of the profile that completed samkv's options (`EngineInfo.samkv`)
    prefix: str = ""  # digest of what documents were prefilled behind (`EngineInfo.prefix`)
    sparse: str = ""  # attention of the engine that was measured (`EngineInfo.sparse`)

    def shortfalls(self, margin: float = MARGIN) -> list[str]:
        """A line for each set on which the strategy falls short. Inconclusive sets count only if there are no
        others. ``margin`` as in `Figures.shortfall`."""
        counted = {name: figures for name, figures in self.sets.items() if figures.conclusive} or self.sets
        return [f"{name}: {why}" for name, figures in counted.items() if (why := figures.shortfall(margin))]

    def verifies(self, margin: float = MARGIN) -> bool:
        """There are figures, and none falls short."""
        return bool(self.sets) and not self.shortfalls(margin)

    def basis(self, margin: float = MARGIN) -> str:
        """What it was verified by, in words: by the set that says least."""
        return min((each.basis(margin) for each in self.sets.values()), key=len, default="")

    @property
    def general(self) -> Entry:
        """The record without namespaces' own questions."""
        sets = {name: figures for name, figures in self.sets.items() if not name.startswith(_NAMESPACE)}
        return replace(self, sets=sets)

    @property
    def each_own(self) -> list[Entry]:
        """The records of namespaces' own questions, one by one."""
        return [replace(self, sets={n: o}) for n, o in self.sets.items() if n.startswith(_NAMESPACE)]

    @property
    def retrievers(self) -> set[str]:
        """What brought the passages, so far as that is known."""
        return {each.retriever for each in self.sets.values() if each.retriever}

    def is_by(self, retriever: str) -> bool:
        """Return whether this brought all passages, or it is not known what did."""
        return self.retrievers <= {retriever}

    def own(self, namespace: str, retriever: str = "") -> Entry:
        """The record of a namespace's own questions alone, as set `set_of` (namespace): with passages of this
        ``retriever`` or, without any, of another."""
        name = set_of(namespace)
        every = [each for each in self.sets.items() if each[0].partition(_BY)[0] == name]
        every.sort(key=lambda each: (each[1].retriever == retriever, not each[1].retriever, each[0] != name))
        return replace(self, sets={name: every[-1][1]} if every else {})


class Gate:
    """Reads the record files, and again when they change; earlier ``places`` win. The other arguments
    describe the engine."""

    def __init__(
        self,
        places: Iterable[Path],
        fingerprint: str,
        *,
        model: str,
        dtype: str,
        samkv: str = "",
        prefix: str = "",
        sparse: str = "",
        retriever: str | Callable[[str], str] = "",
        margin: float = MARGIN,
    ) -> None:
        """``retriever``: what brings the passages of queries (`retriever_of`), by namespace where it is not
        one for all; ``margin``: most points that a strategy may lose by references."""
        self.margin = margin
        self._retriever = retriever
        self._places = tuple(places)
        self._fingerprint = fingerprint
        self._model = model
        self._dtype = dtype
        self._samkv = samkv
        self._prefix = prefix
        self._sparse = sparse
        self._stamps: tuple[int, ...] = ()
        self._records: list[dict[str, Entry]] = []  # by place
        self._entries: dict[tuple[str | None, str], Mapping[str, Entry]] = {}  # by namespace and retriever

    @classmethod
    def of(
        cls,
        settings: Settings,
        usual: Callable[[str], Settings] | None = None,
        /,
        *,
        model: str,
        fingerprint: str,
        **about: str,
    ) -> Gate:
        """Make a gate of the data folder's record and the one in the folder ``model``. ``usual``: the
        settings that queries of a namespace have; without it they are the server's. The other arguments are
        `EngineInfo`'s."""
        places = (settings.data_dir / FILE_NAME, Path(model) / FILE_NAME)
        retriever = (lambda name: retriever_of(usual(name))) if usual else retriever_of(settings)
        own: dict[str, Any] = {**about, "retriever": retriever, "margin": settings.verify_margin}
        return cls(places, fingerprint, model=Path(model).name, **own)

    def searched_by(self, retriever: str) -> Gate:
        """Return the same gate where this brings the passages of queries in all namespaces."""
        self._read_again()
        found = copy.copy(self)
        found._retriever = retriever
        return found

    def entries(self, namespace: str | None = None) -> Mapping[str, Entry]:
        """The records of this model that count in a namespace (None: in one without its own), by strategy. A
        file that cannot be read is logged and ignored."""
        self._read_again()
        retriever, kept = self._retriever_in(namespace), self._entries
        found = kept.get((namespace, retriever))
        if found is None:
            if len(kept) >= _MOST_KEPT:
                kept.clear()
            found = kept[namespace, retriever] = self._entries_of(namespace, retriever)
        return found

    def _entries_of(self, namespace: str | None, retriever: str) -> Mapping[str, Entry]:
        every = [item for record in reversed(self._records) for item in record.items()]
        found = {label: entry.general for label, entry in every if entry.general.sets}
        if namespace is not None:
            for label, entry in every:
                own = entry.own(namespace, retriever)
                if own.sets and (label not in found or own.is_by(retriever)):
                    found[label] = own
        return found

    def _read_again(self) -> None:
        stamps = tuple(changed_at(place) for place in self._places)
        if stamps != self._stamps:
            records = [self._read(place) for place in self._places]
            self._records = [each or {} for each in records]  # first: other threads look at the stamps, too
            self._entries = {}
            self._stamps = () if None in records else stamps

    def _retriever_in(self, namespace: str | None) -> str:
        if isinstance(self._retriever, str):
            return self._retriever
        return "" if namespace is None else self._retriever(namespace)

    def verified(self, namespace: str | None = None) -> list[str]:
        """The strategies that may answer in a namespace (None: in one without records of its own)."""
        entries, retriever = self.entries(namespace), self._retriever_in(namespace)
        return [name for name, one in entries.items() if one.is_by(retriever) and self._lets(name, one)]

    def basis(self, label: str, namespace: str | None = None) -> str:
        """What a strategy is verified by in a namespace, in words."""
        entry = self.entries(namespace).get(label)
        return "" if entry is None else entry.basis(self.margin)

    def good(self, labels: Sequence[str], namespace: str) -> list[str]:
        """Of verified strategies those whose score in a namespace is within `LEVEL` points of the best one's;
        full's own counts for those that have none."""
        known = self.entries(namespace)

        def gain(label: str) -> float:
            own = known[label].sets.get(set_of(namespace)) if label in known else None
            return (own and own.score_vs_full) or 0.0

        best = max(map(gain, labels), default=0.0)
        return [label for label in labels if gain(label) >= best - LEVEL]

    def margins(self, namespace: str) -> list[float]:
        """The margins at which strategies are verified by references in a namespace."""
        entries, name = self.entries(namespace), set_of(namespace)
        own = [entries[label].sets.get(name) for label in self.verified(namespace)]
        return [each.margin for each in own if each is not None and each.margin is not None]

    def recorded(self, label: str, namespace: str) -> RecordedRates:
        """How often answers differed from full's, and were unsupported, when a strategy was verified in a
        namespace."""
        entry = self.entries(namespace).get(label)
        own = None if entry is None else entry.sets.get(set_of(namespace))
        return RecordedRates() if own is None else RecordedRates.of(own.n, own.different, own.unsupported)

    def namespaces(self) -> list[str]:
        """The namespaces that have records of their own."""
        self._read_again()
        every = [entry for record in self._records for entry in record.values()]
        names = {name for entry in every for name in entry.sets if name.startswith(_NAMESPACE)}
        return sorted({name.removeprefix(_NAMESPACE).partition(_BY)[0] for name in names})

    def to_price(self) -> list[str]:
        """What the cost profile must know for the strategies that may answer in some namespace, whatever
        brings its passages: the composed ones without their choice of passages, and `EXACT` where there is
        any. Those that compute everything again are references for the others, and save nothing."""
        self._read_again()
        every = [item for record in reversed(self._records) for item in record.items()]
        each = [(label, one) for label, entry in every for one in (entry.general, *entry.each_own)]
        labels = dict.fromkeys(label for label, one in each if self._lets(label, one))
        composed = [without_passages(parse(label)[0]) for label in labels]
        named = [
            s.label for s in composed if s.name not in NOT_COMPOSED and s.options.get("recompute") != "all"
        ]
        return list(dict.fromkeys([EXACT, *named])) if labels else []

    def _lets(self, label: str, entry: Entry) -> bool:
        same = self._same_defaults(label, entry) and entry.prefix == self._prefix
        same = same and entry.sparse == self._sparse and as_precise(entry.dtype, self._dtype)
        return same and entry.verifies(self.margin)

    def _same_defaults(self, label: str, entry: Entry) -> bool:
        """Return whether the options that the label leaves out are the ones it was measured with."""
        return label.partition(":")[0] != "samkv" or entry.samkv == self._samkv

    def check(self, label: str, namespace: str | None = None) -> None:
        """Raise InvalidRequest (code ``strategy_not_verified``), with what to do, unless the strategy may
        answer in a namespace (None: in one without records of its own)."""
        entry, known = self.entries(namespace).get(label), self.verified(namespace)
        if label in known:
            return
        if entry is None:
            others = f" (verified: {'; '.join(sorted(known))})" if known else ""
            reason = f"has not been verified for {self._model}{others}"
        elif not self._same_defaults(label, entry):
            reason = f"was measured for {self._model} with another samkv profile than the engine has now"
        elif entry.prefix != self._prefix:
            reason = f"was measured for {self._model} with another kv_prefix than the engine has now"
        elif entry.sparse != self._sparse:
            reason = f"was measured for {self._model} with other sparse attention than the engine has now: "
            reason += f"{entry.sparse or 'none'}, now {self._sparse or 'none'}"
        elif not entry.is_by(now := self._retriever_in(namespace)):
            reason = (
                f"was measured for {self._model} with another retriever than the server has now there: "
                f"{'; '.join(sorted(entry.retrievers))}, now {now}"
            )
        elif entry.verifies(self.margin):
            reason = (
                f"was verified for {self._model} in {entry.dtype}, "
                f"and this engine computes in {self._dtype}, which is coarser"
            )
        else:
            reason = (
                f"was measured for {self._model} and fell short ({'; '.join(entry.shortfalls(self.margin))})"
            )
        where = f" --namespace {namespace}" if namespace else ""
        tune = f"ragserve tune{where} --strategies '{label}', or "
        raise InvalidRequest(
            f"Strategy {label} {reason}.",
            hint=f"Measure it, with the server's settings: {tune}with labels ragserve eval "
            f"--data SET --strategies 'full,{label}' --write-gate. "
            'Or force it: strategy_options {"force": true}, or the server\'s --force-strategies true.',
            code="strategy_not_verified",
            param="strategy",
        )

    def _read(self, place: Path) -> dict[str, Entry] | None:
        """The entries of a file, none without it; None if it is to be read again, as where a process is short
        of descriptors."""
        try:
            return _FILE.load(place, self._fingerprint) or {}
        except (OSError, InvalidRequest) as error:
            log.warning("%s verifies nothing: %s", place, error)
            return None if isinstance(error, OSError) else {}


def record(
    place: Path,
    fingerprint: str,
    entries: Mapping[str, Entry],
    *,
    keep_sets: bool = False,
    keep_longer: Collection[str] = (),
) -> list[str]:
    """Add records to a gate's file, replacing those of the same model and strategy; atomic. Figures of other
    namespaces' own questions and, with ``keep_sets``, of other sets stay where they were measured in the same
    precision, with the same samkv profile and prefix. The records of the strategies ``keep_longer`` stay
    where they were measured so, too, on more questions about the same documents; these are returned. A
    strategy with a figure that is not finite is logged instead. Raises InvalidRequest for a foreign file."""
    dumped = [_FILE.dump_or_log({label: entry}, label) for label, entry in entries.items()]
    new = {label: entry for one in dumped for label, entry in one.items()}
    stayed: list[str] = []

    def change(known: dict[str, Any]) -> dict[str, Any]:
        for label, entry in new.items():
            before = known.get(label)
            if before and all(before.get(name, "") == entry[name] for name in _MEASURED_WITH):
                kept = {n: own for n, own in before["sets"].items() if keep_sets or n.startswith(_NAMESPACE)}
                if label in keep_longer and any(_is_longer(kept.get(n), o) for n, o in entry["sets"].items()):
                    stayed.append(label)
                entry["sets"] = kept | entry["sets"]
        return known | {label: entry for label, entry in new.items() if label not in stayed}

    _FILE.update(place, fingerprint, change)
    return stayed


def _is_longer(before: Mapping[str, Any] | None, own: Mapping[str, Any]) -> bool:
    """Whether figures of a set rest on more answers, about the same documents."""
    if not before or any(before.get(name, 0) != own[name] for name in ("made_at", "version")):
        return False
    return bool(before["n"] - before.get("failed", 0) > own["n"] - own["failed"])


def made_at(place: Path) -> dict[str, set[float]]:
    """By namespace with records of its own, of any model, what these say of when it was made, in Unix
    seconds; 0 in those of earlier versions. Raises OSError, InvalidRequest for a foreign file."""
    found: dict[str, set[float]] = {}
    for fingerprint in _FILE.models(place):
        for entry in (_FILE.load(place, fingerprint) or {}).values():
            for name, figures in entry.sets.items():
                if name.startswith(_NAMESPACE):
                    own = found.setdefault(name.removeprefix(_NAMESPACE).partition(_BY)[0], set())
                    own.add(figures.made_at)
    return found


def forget(place: Path, namespace: str) -> None:
    """Remove what was measured on a namespace's own questions, of all models."""

    def change(known: dict[str, Any]) -> dict[str, Any]:
        for entry in known.values():
            entry["sets"] = {
                n: o for n, o in entry["sets"].items() if n.partition(_BY)[0] != set_of(namespace)
            }
        return {label: entry for label, entry in known.items() if entry["sets"]}

    for fingerprint in _FILE.models(place):
        known = _FILE.load(place, fingerprint) or {}
        if any(entry.own(namespace).sets for entry in known.values()):
            _FILE.update(place, fingerprint, change)


_FILE: ProfileFile[dict[str, Entry]] = ProfileFile(
    VERSION, "gate's file", "ragserve tune", dict[str, Entry], reads=(1, 2)
)
