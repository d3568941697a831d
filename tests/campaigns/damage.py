"""Files of documents' KV and summaries, damaged: flipped, cut, or exchanged between documents, tenants and
models. None of them may be served: after a restart each is a miss, and computed again it is right.

An operation is one damaged file. Half of the files have a summary. No engine runs: the store is what the
scheduler asks, and all that reads these files."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from sglang_ext.documents.pages.page_format import ALIGN
from sglang_ext.documents.tier_store import TierStore
from tests.campaigns.progress import Progress
from tests.unit.documents.document_samples import FINGERPRINT, Sample, files_of, flushed, opened

TARGET = 10_000
TENANTS = ("mine", "theirs")
MODELS = (FINGERPRINT, "model-b/tokenizer-a")
DOCUMENTS = 8  # of a tenant and model; the same texts for all of them
_TOKENS = (5, 17, 18, 33, 64, 100, 1, 40)
Place = tuple[str, str, int]  # model, tenant, number


def flip(path: Path, other: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    end = chance.choice((len(content), min(ALIGN, len(content))))  # pages are most of a file, its record not
    for _ in range(chance.choice((1, 1, 2, 30))):
        content[chance.randrange(end)] ^= 1 << chance.randrange(8)
    if content != path.read_bytes():
        path.write_bytes(content)
    else:  # the same bit twice
        flip(path, other, chance)


def cut(path: Path, other: Path, chance: random.Random) -> None:
    os.truncate(path, chance.randrange(path.stat().st_size))


def grow(path: Path, other: Path, chance: random.Random) -> None:
    with path.open("ab") as file:
        file.write(chance.randbytes(chance.randint(1, 5000)))


def exchange(path: Path, other: Path, chance: random.Random) -> None:
    """The whole file of another document, tenant or model."""
    shutil.copy(other, path)


def exchange_part(path: Path, other: Path, chance: random.Random) -> None:
    """Some bytes of another file at the same place."""
    content, foreign = bytearray(path.read_bytes()), other.read_bytes()
    start = chance.randrange(min(len(content), len(foreign)))
    end = start + chance.randint(1, 4096)
    part = foreign[start:end][: len(content) - start]
    if content[start : start + len(part)] == part:
        cut(path, other, chance)
    else:
        content[start : start + len(part)] = part
        path.write_bytes(content)


def blank(path: Path, other: Path, chance: random.Random) -> None:
    """Zeros, as a file system may leave after a crash."""
    content = bytearray(path.read_bytes())
    start = chance.randrange(len(content))
    length = min(chance.randint(1, 4096), len(content) - start)
    if any(content[start : start + length]):
        content[start : start + length] = bytes(length)
        path.write_bytes(content)
    else:
        cut(path, other, chance)


DAMAGES: tuple[Callable[[Path, Path, random.Random], None], ...] = (
    *(flip, flip, cut, grow),
    *(exchange, exchange, exchange_part, blank),
)


def _sample(place: Place) -> Sample:
    model, tenant, number = place
    return Sample(number, _TOKENS[number], namespace=tenant, fingerprint=model)


def _summary(place: Place) -> bytes:
    return repr(place).encode() * 40


class Round:
    """All documents of all tenants and models, written; then damaged; then looked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.places = [(m, t, n) for m in MODELS for t in TENANTS for n in range(DOCUMENTS)]
        self.samples = {place: _sample(place) for place in self.places}

    def _model(self, model: str) -> Path:
        return self.folder / f"model-{MODELS.index(model)}"

    def write(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        for model in MODELS:
            with opened(self._model(model), fingerprint=model) as store:
                for place in self._of(model):
                    self.samples[place].put(store)
                    if place[2] % 2:
                        assert store.put_summary(self.samples[place].key, _summary(place))
                flushed(store)

    def _of(self, model: str) -> list[Place]:
        return [place for place in self.places if place[0] == model]

    def path(self, place: Place) -> Path:
        key = self.samples[place].key
        (found,) = (path for path in files_of(self._model(place[0])) if path.stem == key)
        return found

    def assert_missed(self, damaged: dict[Place, str]) -> None:
        """No damaged document is served, the others are, and computed again all are right."""
        for model in MODELS:
            with opened(self._model(model), fingerprint=model) as store:
                for place in self._of(model):
                    self._look(store, place, damaged.get(place))
                    self.samples[place].put(store)
                flushed(store)
                store.drop_host()
                assert store.verify().ok
                assert all(self.samples[place].load_and_check(store) for place in self._of(model))

    def _look(self, store: TierStore, place: Place, damage: str | None) -> None:
        """Load a document and its summary; one of them must be missed if its file is damaged."""
        sample, summary = self.samples[place], _summary(place) if place[2] % 2 else None
        served = sample.found(store) is not None and sample.load_and_check(store)
        ticket = store.summary(sample.key)
        assert ticket.finished.wait(30)
        assert ticket.data in (None, summary), f"{place}: a wrong summary was served ({damage})"
        whole = served and ticket.data == summary
        assert whole == (damage is None), f"{place}: damage {damage}, served whole: {whole}"
        store.remove(sample.key)


def run(progress: Progress) -> None:
    while progress.goes_on():
        chance = progress.random()
        work = Round(progress.folder / "kv")
        work.write()
        left = (progress.target or TARGET) - progress.operations
        places = chance.sample(work.places, min(len(work.places) * 3 // 4, left))
        intact = {place: work.path(place).read_bytes() for place in work.places}
        damaged: dict[Place, str] = {}
        for place in places:
            damage = chance.choice(DAMAGES)
            other = work.folder / "other"
            other.write_bytes(intact[chance.choice([each for each in work.places if each != place])])
            damage(work.path(place), other, chance)
            damaged[place] = damage.__name__
            progress.counts[damage.__name__] += 1
        with progress.operation("files", len(places)):
            work.assert_missed(damaged)
