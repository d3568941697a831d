"""The cost model: fitted to made-up machines, and what strategy auto makes of it."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ragserve.answering.auto import Chooser
from ragserve.answering.chosen_passages import ChosenPassages
from ragserve.answering.prompt import Prompt, Segment
from ragserve.best_passages import PassagesOptions
from ragserve.engine.base import EngineInfo, GenerateRequest
from ragserve.engine.document_cache import ControlledCache, Whereabouts
from ragserve.engine.sent_prefixes import SentPrefixes
from ragserve.errors import EngineError, InvalidRequest, RagserveError
from ragserve.profiles.costs import COSTS, Costs, CostSample, fit
from ragserve.profiles.figures import Figures
from ragserve.profiles.gate import Entry, Gate, record
from ragserve.profiles.hardware import cpu_name
from sglang_ext.wire.protocol import prefix_key

LENGTHS = (512, 1024, 2048, 4096)


def machine(slow_disk: float = 1.0) -> list[CostSample]:
    """10 ms and 0.1 ms a token and 1e-5 ms a pair of tokens; composing 5 ms and 0.01 ms a token, twice that
    from host.
    """
    samples = [CostSample(n, 10 + 0.1 * n + 1e-5 * n * n) for n in LENGTHS]
    samples += [CostSample(n, 10 + 0.1 * n / 2 + 1e-5 * (n * n - n * n / 4), cached=n // 2) for n in LENGTHS]
    for tier, factor in (("device", 1.0), ("host", 2.0), ("disk", 3.0 * slow_disk)):
        samples += [
            CostSample(n, 5 + 0.01 * n * factor, strategy="epic:first=16", tier=tier) for n in LENGTHS
        ]
    return samples


def costs(samples: Sequence[CostSample] | None = None, hardware: str = "") -> Costs:
    return fit(machine() if samples is None else samples, model="tiny", hardware=hardware, date="2026-01-01")


def test_profiles_behind_a_link_are_kept_there(tmp_path: Path) -> None:
    """Data folders that share a profile file by links see each other's entries."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "costs.json").symlink_to(tmp_path / "costs.json")
        COSTS.save(tmp_path / name / "costs.json", f"model of {name}", costs())
    assert list(COSTS.models(tmp_path / "costs.json")) == ["model of a", "model of b"]
    assert [path.name for path in sorted(tmp_path.glob("**/*.lock"))] == ["costs.json.lock"], "one for both"


def test_a_fit_recovers_the_machine() -> None:
    found = costs()
    assert found.exact == pytest.approx((10, 0.1, 1e-5), rel=1e-3)
    assert found.error < 1e-4
    assert found.exact_ms(3000) == pytest.approx(10 + 300 + 90, rel=1e-3)
    assert found.exact_ms(3000, 2990) == pytest.approx(10 + 1 + 1e-5 * (3000**2 - 2990**2), rel=1e-3)
    label = "epic:first=16"
    assert found.composed_ms(label, [(1000, "device")]) == pytest.approx(15, rel=1e-3)
    assert found.composed_ms(label, [(500, "device"), (500, "host")]) == pytest.approx(20, rel=1e-3)
    missing = found.composed_ms(label, [(500, "device"), (500, "absent")])
    assert missing == pytest.approx(15 + 10 + 50 + 2.5, rel=1e-3), "prefilled alone first, on the device then"
    assert math.isinf(found.composed_ms("concat", [(1000, "device")]))
    assert math.isinf(costs([s for s in machine() if s.tier != "disk"]).composed_ms(label, [(1000, "disk")]))


def test_a_shared_store_costs_what_was_measured_and_before_that_as_much_as_computing() -> None:
    label, shared = "epic:first=16", [(500, "device"), (500, "remote")]
    absent = costs().composed_ms(label, [(500, "device"), (500, "absent")])
    assert costs().composed_ms(label, shared) == absent
    remote = [CostSample(n, 5 + 0.06 * n, strategy=label, tier="remote") for n in LENGTHS]
    assert costs([*machine(), *remote]).composed_ms(label, shared) == pytest.approx(5 + 35, rel=1e-3)


def cold(samples: list[CostSample], step: float = 30.0, each: float = 0.5) -> list[CostSample]:
    """The same machine, on which a context of new documents takes ``step`` and ``each`` ms a token more."""
    label = "epic:first=16"
    return samples + [
        CostSample(n, 5 + 0.01 * n + step + each * n, strategy=label, tier="absent") for n in LENGTHS
    ]


def test_documents_that_are_cached_nowhere_cost_what_was_measured() -> None:
    found, label = costs(cold(machine())), "epic:first=16"
    assert found.error < 1e-3
    assert found.composed_ms(label, [(1000, "absent")]) == pytest.approx(15 + 30 + 500, rel=1e-2)
    mixed = found.composed_ms(label, [(900, "device"), (100, "absent")])
    assert mixed == pytest.approx(15 + 30 + 50, rel=1e-2), "the step is paid for the first document"
    assert costs().composed_ms(label, [(1000, "absent")]) < 150, "a prefill alone was too little"
    without = [sample for sample in cold(machine()) if sample.tier != "device"]
    assert math.isinf(costs(without).composed_ms(label, [(1000, "absent")]))


def test_auto_knows_that_new_documents_are_dear(tmp_path: Path) -> None:
    """A prefill of the missing third and composing would be sooner than a prefill of all; analysing it is
    not."""
    engine: Any = Cache(0, "device", "device", "absent")
    COSTS.save(tmp_path / "costs.json", "abc", costs())
    assert choice(tmp_path, engine)[0] == "epic:first=16"
    COSTS.save(tmp_path / "costs.json", "abc", costs(cold(machine())))
    label, reason = choice(tmp_path, engine)
    assert label == "prefix"
    assert "1 of 3 documents cached nowhere" in reason


def test_noise_never_makes_a_prompt_cheaper_by_being_longer() -> None:
    noisy = [CostSample(n, (10 + 0.1 * n) * (1.1 if i % 2 else 0.9)) for i, n in enumerate((256, *LENGTHS))]
    found = costs(noisy)
    assert all(coefficient >= 0 for coefficient in found.exact)
    assert 0 < found.error < 0.15


def test_a_profile_is_kept_by_model(tmp_path: Path) -> None:
    place = tmp_path / "data" / "costs.json"
    assert COSTS.load(place, "abc") is None
    found = costs()
    COSTS.save(place, "abc", found)
    COSTS.save(place, "other", costs(machine(2.0)))
    assert COSTS.load(place, "abc") == found
    assert COSTS.load(place, "unknown") is None


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_figure_that_is_not_finite_is_not_written(tmp_path: Path, value: float) -> None:
    place = tmp_path / "costs.json"
    COSTS.save(place, "abc", costs())
    before = place.read_bytes()
    with pytest.raises(RagserveError, match=r"figure of the cost profile is not finite.*ragserve calibrate"):
        COSTS.save(place, "abc", replace(costs(), exact=(1.0, value, 0.0)))
    assert place.read_bytes() == before


@pytest.mark.parametrize(
    "text", ["", "{}", '{"version": 7, "models": {}}', '{"version": 1, "models": {"abc": {"exact": [1]}}}']
)
def test_a_foreign_file_is_named(tmp_path: Path, text: str) -> None:
    place = tmp_path / "costs.json"
    place.write_text(text)
    with pytest.raises(InvalidRequest, match="not a cost profile"):
        COSTS.load(place, "abc")


def test_too_few_measurements() -> None:
    with pytest.raises(InvalidRequest, match="too few"):
        costs([CostSample(100, 1.0), CostSample(200, 2.0)])


class Cache:
    """An engine of which only what it has cached matters."""

    def __init__(self, prefix: int, *tiers: str) -> None:
        self._prefix, self._tiers = prefix, tiers
        self.info = EngineInfo(
            "local",
            "tiny",
            "tiny",
            "0",
            "cpu",
            "",
            8192,
            8192,
            ("full", "prefix", "epic"),
            "abc",
            dtype="float32",
        )

    async def ready(self) -> bool:
        return True

    async def warm(self, request: GenerateRequest) -> None: ...

    async def control(self, operation: str, **arguments: Any) -> dict[str, Any]:
        raise AssertionError(f"choosing a strategy asked for control operation {operation!r}")

    async def prefix(self, namespace: str, input_ids: Sequence[int]) -> int:
        return self._prefix

    async def where(self, namespace: str, documents: Sequence[Sequence[int]]) -> Whereabouts:
        below: Any = tuple("absent" if tier == "device" else tier for tier in self._tiers)
        held = [tuple(tier == name for tier in self._tiers) for name in ("device", "host")]
        return Whereabouts(held[0], held[1], below, "disk", None, 0, 0, 16, 0, {})


class Exact:
    """An engine without a document cache."""

    info = Cache(0).info


DEVICE = ("device",) * 3

PROMPT = Prompt(
    [0] * 2048,
    (
        Segment("system", 0, 16),
        Segment("document", 16, 1000),
        Segment("document", 1000, 2000),
        Segment("question", 2000, 2048),
    ),
    2,
    1984,
    1984,
)
GOOD = Figures(n=500, f1=99.0, f1_vs_full=0.0, kl=0.01, kept=100.0, recomputed=10.0)


def choice(tmp_path: Path, engine: Any, *, verified: str = "epic:first=16") -> tuple[str, str]:
    record(tmp_path / "gate.json", "abc", {verified: Entry({"s": GOOD}, "tiny", "d", "h", "float32")})
    made = asyncio.run(
        Chooser(
            engine,
            Gate([tmp_path / "gate.json"], "abc", model="tiny", dtype="float32"),
            tmp_path / "costs.json",
        ).choose(PROMPT, "n")
    )
    return made.spec.label, made.reason


def test_costs_of_other_hardware_are_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragserve.profiles.hardware._gpus", dict)
    COSTS.save(tmp_path / "costs.json", "abc", costs(hardware="another CPU"))
    label, reason = choice(tmp_path, Cache(16, *DEVICE))
    assert (label, "no cost profile of this machine" in reason) == ("prefix", True)
    COSTS.save(tmp_path / "costs.json", "abc", costs(hardware=cpu_name()))
    assert choice(tmp_path, Cache(16, *DEVICE))[0] == "epic:first=16"
    elsewhere = Cache(16, *DEVICE)
    elsewhere.info = replace(elsewhere.info, device="cuda")
    COSTS.save(tmp_path / "costs.json", "abc", costs(hardware="a GPU"))
    assert choice(tmp_path, elsewhere)[0] == "epic:first=16", "where the GPU has no name nobody can tell"


def test_auto_takes_what_is_expected_to_be_first(tmp_path: Path) -> None:
    COSTS.save(tmp_path / "costs.json", "abc", costs())
    label, reason = choice(tmp_path, Cache(16, *DEVICE))
    assert label == "epic:first=16"
    assert "epic:first=16 25 ms, prefix 255 ms" in reason
    assert "; all 2 passages; verified by 500 questions with labels" in reason
    assert choice(tmp_path, Cache(2000, *DEVICE))[0] == "prefix", (
        "the prompt is nearly all in the prefix cache"
    )
    label, reason = choice(tmp_path, Cache(0, "device", "absent", "absent"))
    assert label == "prefix"
    assert "2 of 3 documents cached nowhere" in reason


@pytest.mark.parametrize(
    ("engine", "verified", "says"),
    [
        (Cache(0, *DEVICE), "concat", "verified"),  # calibrated is epic only
        (Cache(0, *DEVICE), "samkv:update=fusion", "verified"),
        (Exact(), "epic:first=16", "does not report"),
    ],
    ids=["not-calibrated", "unknown", "no-cache"],
)
def test_auto_is_exact_where_it_cannot_know_better(
    tmp_path: Path, engine: Any, verified: str, says: str
) -> None:
    COSTS.save(tmp_path / "costs.json", "abc", costs())
    label, reason = choice(tmp_path, engine, verified=verified)
    assert label == "prefix"
    assert says in reason


def best(count: int) -> Any:
    """Chooses the first passages of four."""

    async def choose(options: PassagesOptions) -> ChosenPassages:
        return ChosenPassages(list(range(4)), options.count or count, 100)

    return choose


@pytest.mark.parametrize(
    ("label", "strategy", "ms"),
    [("passages:count=1", "passages:count=1", "14 ms"), ("epic:first=16,passages.count=1", None, "")],
    ids=["exact", "composed"],
)
def test_auto_reads_fewer_passages_where_that_is_sooner(
    tmp_path: Path, label: str, strategy: str | None, ms: str
) -> None:
    record(tmp_path / "gate.json", "abc", {label: Entry({"s": GOOD}, "tiny", "d", "h", "float32")})
    COSTS.save(tmp_path / "costs.json", "abc", costs())
    gate = Gate([tmp_path / "gate.json"], "abc", model="tiny", dtype="float32")
    engine: Any = Cache(0, *DEVICE)
    chooser = Chooser(engine, gate, tmp_path / "costs.json")
    made = asyncio.run(chooser.choose(PROMPT, "n", choose=best(1)))
    assert made.spec.label == label
    assert made.passages is not None
    assert made.passages.kept == 1
    assert "the best 1 of 4 passages; verified by 500 questions with labels" in made.reason
    without = asyncio.run(chooser.choose(PROMPT, "n"))
    assert without.spec.label == "prefix", "where passages cannot be chosen"
    assert asyncio.run(chooser.choose(PROMPT, "n", whole=True, choose=best(1))).spec.label == "prefix"


def test_auto_chooses_passages_while_the_engine_is_asked(tmp_path: Path) -> None:
    label, seen = "passages:count=1", []
    record(tmp_path / "gate.json", "abc", {label: Entry({"s": GOOD}, "tiny", "d", "h", "float32")})
    COSTS.save(tmp_path / "costs.json", "abc", costs())

    class Slow(Cache):
        async def prefix(self, namespace: str, input_ids: Sequence[int]) -> int:
            seen.append("asked")
            await asyncio.sleep(0)
            seen.append("answered")
            return 0

    async def choose(options: PassagesOptions) -> ChosenPassages:
        seen.append("chosen")
        return ChosenPassages([0, 1], 1, 100)

    engine: Any = Slow(0, *DEVICE)
    gate = Gate([tmp_path / "gate.json"], "abc", model="tiny", dtype="float32")
    made = asyncio.run(Chooser(engine, gate, tmp_path / "costs.json").choose(PROMPT, "n", choose=choose))
    assert (made.spec.label, seen) == (label, ["asked", "chosen", "answered"])


class Local(Cache, ControlledCache):
    """An engine that knows every prompt it was sent."""

    def __init__(self, cached: int) -> None:
        super().__init__(cached, *DEVICE)
        self.sent_prefixes: SentPrefixes = SentPrefixes()
        self.asked = 0

    async def prefix(self, namespace: str, input_ids: Sequence[int]) -> int:
        self.asked += 1
        return self._prefix


def test_an_engine_is_asked_only_where_what_was_sent_may_change_the_choice(tmp_path: Path) -> None:
    COSTS.save(tmp_path / "costs.json", "abc", costs())
    engine = Local(0)
    label, reason = choice(tmp_path, engine)
    assert (label, engine.asked) == ("epic:first=16", 0)
    assert "at most 1023 of 2048 tokens in the prefix cache" in reason
    engine.sent_prefixes.note(prefix_key("n"), [*PROMPT.input_ids[:-1], 1])
    assert (choice(tmp_path, engine)[0], engine.asked) == ("epic:first=16", 1), "evicted meanwhile"
    engine = Local(2047)
    engine.sent_prefixes.note(prefix_key("n"), PROMPT.input_ids)
    label, reason = choice(tmp_path, engine)
    assert (label, engine.asked) == ("prefix", 1)
    assert "(2047 of 2048 tokens in the prefix cache" in reason


def test_auto_sees_a_profile_that_comes_later(tmp_path: Path) -> None:
    record(tmp_path / "gate.json", "abc", {"epic:first=16": Entry({"s": GOOD}, "tiny", "d", "h", "float32")})
    engine: Any = Cache(0, *DEVICE)
    chooser = Chooser(
        engine, Gate([tmp_path / "gate.json"], "abc", model="tiny", dtype="float32"), tmp_path / "costs.json"
    )
    first = asyncio.run(chooser.choose(PROMPT, "n"))
    assert (first.spec.label, "ragserve tune" in first.reason) == ("prefix", True)
    COSTS.save(tmp_path / "costs.json", "abc", costs())
    assert asyncio.run(chooser.choose(PROMPT, "n")).spec.label == "epic:first=16"
    (tmp_path / "costs.json").write_text("{")
    os.utime(tmp_path / "costs.json", ns=(1, 1))
    broken = asyncio.run(chooser.choose(PROMPT, "n"))
    assert (broken.spec.label, "not a cost profile" in broken.reason) == ("prefix", True)


class Asked(Cache):
    """An engine that fails whoever asks it about its cache."""

    async def prefix(self, namespace: str, input_ids: Sequence[int]) -> int:
        raise EngineError("The document cache failed to prefix.")

    where: Any = prefix


def test_with_nothing_measured_auto_is_exact_asks_nothing_and_says_what_to_do(tmp_path: Path) -> None:
    def choose(engine: Any) -> tuple[str, str]:
        gate = Gate([tmp_path / "gate.json"], "abc", model="tiny", dtype="float32")
        made = asyncio.run(Chooser(engine, gate, tmp_path / "costs.json").choose(PROMPT, "n"))
        return made.spec.label, made.reason

    engine = Asked(0, *DEVICE)
    label, reason = choose(engine)
    assert (label, "ragserve tune" in reason, "\n" in reason) == ("prefix", True, False)
    record(tmp_path / "gate.json", "abc", {"epic:first=16": Entry({"s": GOOD}, "tiny", "d", "h", "float32")})
    label, reason = choose(engine)
    assert (label, "ragserve tune" in reason) == ("prefix", True)
    COSTS.save(tmp_path / "costs.json", "abc", costs())
    assert choose(engine) == ("prefix", "The document cache failed to prefix."), "asked, and still answering"
    engine.info = replace(engine.info, strategies=("full", "prefix"), only_exact="the KV has 8 bits")
    assert choose(engine) == ("prefix", "the KV has 8 bits")
