"""The gate: strategies that it lets through, and reasons why it refuses others."""

from __future__ import annotations

import dataclasses
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ragserve.config import DEFAULT_MODEL, Settings, load
from ragserve.engine.base import EngineInfo
from ragserve.errors import InvalidRequest
from ragserve.profiles.figures import Figures
from ragserve.profiles.gate import EXACT, FILE_NAME, Entry, Gate, record, set_of
from ragserve.profiles.in_use import RecordedRates
from sglang_ext.documents.fingerprint import model_fingerprint
from tests.campaigns.troubles import few_descriptors

DEFAULT_RECORD = Path(DEFAULT_MODEL) / FILE_NAME
PREFIX = "87ee5a12"  # of the embedded model's tokens of the text that ragserve ships
[BUNDLED] = json.loads(DEFAULT_RECORD.read_text())["models"]
GOOD = Figures(n=500, f1=97.5, f1_vs_full=-1.5, kl=0.3, kept=100.0, recomputed=10.0)


def entry(*figures: Figures) -> Entry:
    return Entry(
        {f"set{number}": each for number, each in enumerate(figures)},
        "tiny",
        "2026-01-01",
        "a CPU",
        "float32",
    )


def figures(**changed: Any) -> Figures:
    return dataclasses.replace(GOOD, **changed)


def gate_of(settings: Settings, info: EngineInfo) -> Gate:
    return Gate.of(
        settings, model=info.model, fingerprint=info.fingerprint, dtype=info.dtype, samkv=info.samkv
    )


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, None),
        ({"f1_vs_full": -2.0}, None),
        ({"f1_vs_full": -2.1}, "2.1 points below full"),
        ({"f1_vs_full": -40.0, "kl": 0.01}, None),
        ({"f1_vs_full": -40.0, "kl": None}, "KL unknown"),
        ({"n": 99}, "fewer than 100"),
        ({"failed": 5}, None),
        ({"failed": 6}, "6 failed"),
        ({"failed": 3, "fallbacks": 3}, "3 failed, 3 answered by another strategy"),
        ({"fallbacks": 6}, "6 answered by another strategy"),
        ({"f1": 5.0, "f1_vs_full": 0.5}, "proves nothing"),
        ({"f1": 5.0, "f1_vs_full": 0.5, "kl": 0.001}, None),
    ],
)
def test_what_figures_verify(changed: dict[str, Any], why: str | None) -> None:
    found = figures(**changed).shortfall()
    assert found is None if why is None else found is not None and why in found


UNLABELLED = Figures(
    n=150,
    f1=None,
    f1_vs_full=None,
    kl=0.5,
    kept=20.0,
    recomputed=10.0,
    answer_kl=0.004,
    answer_kl_bound=0.008,
    answer_agrees=97.0,
    answer_regret=0.5,
    answer_regret_bound=1.6,
)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, None),
        ({"n": 40}, None),
        ({"answer_kl_bound": 0.0101}, "at most 0.0101 (limit 0.01)"),
        ({"answer_regret_bound": 2.1}, "regret 0.5 %, at most 2.1 % (limit 2)"),
        ({"answer_regret_bound": None, "answer_agrees_bound": 98.4}, None),  # an earlier record
        ({"answer_regret_bound": None, "answer_regret": None, "answer_agrees_bound": 97.9}, "at most 2.1 %"),
        ({"answer_kl_bound": None, "kl": 0.5}, "KL 0.5, above"),
        ({"failed": 1}, None),
        ({"failed": 2}, "2 failed"),
    ],
)
def test_what_figures_without_labels_verify(changed: dict[str, Any], why: str | None) -> None:
    found = dataclasses.replace(UNLABELLED, **changed).shortfall()
    assert found is None if why is None else found is not None and why in found


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"f1_vs_full": -1.0, "f1_loss_bound": 1.9}, None),
        ({"f1_vs_full": -1.0, "f1_loss_bound": 2.1}, "1.0 points below full, at 95 % at most 2.1"),
        ({"f1_loss_bound": 9.0, "answer_kl_bound": 0.001, "answer_regret_bound": 1.0}, None),
        ({"f1_loss_bound": 9.0, "kl": 0.001, "answer_kl_bound": 0.1, "answer_regret_bound": 1.0}, "9.0"),
    ],
)
def test_the_bound_decides_where_there_is_one(changed: dict[str, Any], why: str | None) -> None:
    found = figures(**changed).shortfall()
    assert found is None if why is None else found is not None and why in found


def test_a_record_of_version_1_keeps_its_rule(tmp_path: Path) -> None:
    """Written by hand as version 1 was."""
    place = tmp_path / FILE_NAME
    figures_of_1 = {
        "n": 457,
        "f1": 98.25,
        "f1_vs_full": -0.66,
        "kl": 0.0122,
        "kept": 100.0,
        "recomputed": 10.0,
        "fallbacks": 0,
        "failed": 0,
    }
    old = {"model": "tiny", "date": "d", "hardware": "h", "dtype": "float32", "versions": {}, "samkv": ""}
    entries = {"concat": old | {"sets": {"onehop": figures_of_1}}}
    place.write_text(json.dumps({"version": 1, "models": {"abc": entries}}))
    gate = Gate([place], "abc", model="tiny", dtype="float32")
    assert gate.verified() == ["concat"]
    record(place, "abc", {"epic": entry(figures(f1_loss_bound=2.5))})
    assert json.loads(place.read_text())["version"] == 3
    assert gate.verified() == ["concat"], "beside a record with bounds, which falls short"


def test_the_embedded_model_brings_verified_strategies() -> None:
    bundled, fine, coarse = (
        Gate([DEFAULT_RECORD], BUNDLED, model="ragserve-tiny", dtype=dtype, prefix=PREFIX)
        for dtype in ("bfloat16", "float32", "bfloat16, KV fp8_e5m2")
    )
    verified = [f"concat:recompute=sentences,share={share}" for share in (0.1, 0.15, 0.2, 0.3)]
    assert sorted(bundled.verified()) == sorted(fine.verified()) == verified
    assert not coarse.verified(), "it was measured in bfloat16"


def test_what_was_measured_with_another_prefix_is_refused() -> None:
    alone = Gate([DEFAULT_RECORD], BUNDLED, model="ragserve-tiny", dtype="bfloat16")
    assert not alone.verified()
    with pytest.raises(InvalidRequest, match="with another kv_prefix"):
        alone.check("concat:recompute=sentences,share=0.15")


def test_figures_of_other_sets_stay_where_they_are_asked_to(tmp_path: Path) -> None:
    place = tmp_path / "gate.json"
    gate = Gate([place], "abc", model="tiny", dtype="float32")
    record(place, "abc", {"concat": Entry({"a": GOOD}, "tiny", "d", "h", "float32")})
    bad = dataclasses.replace(UNLABELLED, answer_kl_bound=9.0)
    record(place, "abc", {"concat": Entry({"b": bad}, "tiny", "d", "h", "float32")}, keep_sets=True)
    assert set(gate.entries()["concat"].sets) == {"a", "b"}
    assert not gate.verified(), "every set must pass"
    record(place, "abc", {"concat": Entry({"b": UNLABELLED}, "tiny", "d", "h", "float32")}, keep_sets=True)
    assert gate.verified() == ["concat"]
    record(place, "abc", {"concat": Entry({"c": GOOD}, "tiny", "d", "h", "bfloat16")}, keep_sets=True)
    assert set(gate.entries()["concat"].sets) == {"c"}, "measured in another precision"


def test_a_measurement_on_a_namespace_counts_there_and_nowhere_else(tmp_path: Path) -> None:
    """Here concat is refused on a and epic verified; the model's own records go on for all others."""
    place, brought = tmp_path / "gate.json", tmp_path / "brought.json"
    record(brought, "abc", {"concat": entry(GOOD), "random": entry(GOOD)})
    bad = dataclasses.replace(UNLABELLED, answer_kl_bound=9.0)
    for label, found in (("concat", bad), ("epic", UNLABELLED)):
        measured_on_a = Entry({set_of("a"): found}, "tiny", "d", "h", "float32")
        record(place, "abc", {label: measured_on_a}, keep_sets=True)
    gate = Gate([place, brought], "abc", model="tiny", dtype="float32")
    assert sorted(gate.verified("a")) == ["epic", "random"]
    assert sorted(gate.verified("b")) == sorted(gate.verified()) == ["concat", "random"]
    assert set(gate.to_price()) == {EXACT, "concat", "epic", "random"}
    record(place, "abc", {"concat:recompute=all": entry(GOOD)})
    assert "concat:recompute=all" in gate.verified("b")
    assert "concat:recompute=all" not in gate.to_price(), "nobody need know what that costs"
    record(place, "abc", {"concat:passages.keep=0.25": entry(GOOD)})
    assert "concat:passages.keep=0.25" in gate.verified("b")
    assert "concat:passages.keep=0.25" not in gate.to_price(), "it costs what concat does"
    gate.check("concat", "b")
    with pytest.raises(InvalidRequest, match=r"fell short \(namespace a: .*tune --namespace a "):
        gate.check("concat", "a")
    with pytest.raises(InvalidRequest, match="has not been verified for tiny"):
        gate.check("epic", "b")


def test_an_evaluation_leaves_the_verdicts_of_namespaces(tmp_path: Path) -> None:
    place = tmp_path / "gate.json"
    gate = Gate([place], "abc", model="tiny", dtype="float32")
    own = Entry({set_of("a"): UNLABELLED}, "tiny", "d", "h", "float32")
    record(place, "abc", {"concat": own}, keep_sets=True)
    record(place, "abc", {"concat": entry(figures(f1_vs_full=-9.0))})
    assert (gate.verified("a"), gate.verified("b")) == (["concat"], [])
    record(place, "abc", {"concat": entry(GOOD)})
    assert gate.verified("b") == ["concat"]


REFERRED = dataclasses.replace(
    UNLABELLED, answer_kl_bound=0.5, score=60.0, score_vs_full=1.0, references=350, margin=4.2, different=12.0
)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, None),
        ({"margin": 5.1}, "over 350 probes 1.0 points above full, at 95 % at most 5.1 below (limit 5)"),
        ({"margin": 9.0, "answer_kl_bound": 0.001}, None),  # it answers as full does
        ({"margin": 9.0, "answer_kl_bound": None, "kl": 0.001}, "at most 9.0"),  # not by the first token
        ({"failed": 1}, None),
        ({"failed": 2}, "2 failed"),
    ],
)
def test_a_loss_that_is_excluded_by_references_verifies(changed: dict[str, Any], why: str | None) -> None:
    found = dataclasses.replace(REFERRED, **changed).shortfall()
    assert found is None if why is None else found is not None and why in found


def test_the_margin_is_the_servers_and_the_record_says_what_was_reached(tmp_path: Path) -> None:
    place = tmp_path / "gate.json"
    label = "passages:count=3"
    own = Entry({set_of("a"): REFERRED}, "tiny", "d", "h", "float32")
    record(place, "abc", {label: own, "concat": entry(GOOD)}, keep_sets=True)

    def gate(margin: float = 5.0, retriever: str = "") -> Gate:
        return Gate([place], "abc", model="tiny", dtype="float32", margin=margin, retriever=retriever)

    assert gate().verified("a") == ["concat", label]
    assert gate(2.0).verified("a") == ["concat"]
    assert gate().basis(label, "a") == "verified by 350 questions at a margin of 4.2 points"
    assert "with labels" in gate().basis("concat", "a")
    assert gate().recorded(label, "a") == RecordedRates((0.12, 150), None)
    assert gate().recorded("concat", "a") == RecordedRates(), "of no namespace"
    better = dataclasses.replace(REFERRED, margin=-1.5)
    assert better.basis() == "verified by 350 questions: at least 1.5 points better"
    assert "an earlier record" in UNLABELLED.basis(), "it counts, and says so"


def test_of_what_is_verified_the_best_and_what_is_nearly_as_good_counts(tmp_path: Path) -> None:
    place = tmp_path / "gate.json"
    gains = {"passages:count=1": -3.0, "passages:count=3": 6.0, "passages:count=5": 4.5}
    for label, gain in gains.items():
        found = dataclasses.replace(REFERRED, score_vs_full=gain)
        record(place, "abc", {label: Entry({set_of("a"): found}, "tiny", "d", "h", "float32")})
    gate = Gate([place], "abc", model="tiny", dtype="float32")
    every = [*gains, "concat"]
    assert gate.good(every, "a") == ["passages:count=3", "passages:count=5"]
    assert gate.good(every[:1] + every[3:], "a") == ["concat"], "which loses nothing that is known"
    assert gate.good(every, "b") == every


def test_what_was_measured_with_another_retriever_does_not_count(tmp_path: Path) -> None:
    place = tmp_path / "gate.json"
    figures = dataclasses.replace(REFERRED, retriever="words, dense, k 20")
    record(place, "abc", {"concat": Entry({set_of("a"): figures}, "tiny", "d", "h", "float32")})
    same = Gate([place], "abc", model="tiny", dtype="float32", retriever="words, dense, k 20")
    other = Gate([place], "abc", model="tiny", dtype="float32", retriever="words, dense, k 5")
    assert (same.verified("a"), other.verified("a")) == (["concat"], [])
    with pytest.raises(InvalidRequest, match="with another retriever than the server has"):
        other.check("concat", "a")


def test_every_set_must_pass() -> None:
    assert entry(GOOD, GOOD).verifies()
    assert not entry(GOOD, figures(f1_vs_full=-9.0)).verifies()
    assert not entry().verifies()


def test_a_set_that_full_cannot_answer_neither_verifies_nor_refuses() -> None:
    hard = figures(f1=5.0, f1_vs_full=-3.0, kl=0.5)
    assert entry(GOOD, hard).verifies()
    assert not entry(hard).verifies()
    assert not entry(GOOD, figures(f1=5.0, f1_vs_full=-3.0, kl=0.5, failed=6)).verifies()


def test_a_strategy_is_verified_for_one_model_and_its_very_options(tmp_path: Path) -> None:
    place = tmp_path / "data" / "gate.json"
    gate = Gate([place], "abc", model="tiny", dtype="float32")
    with pytest.raises(InvalidRequest, match="has not been verified for tiny") as refused:
        gate.check("epic:first=16")
    assert refused.value.code == "strategy_not_verified"
    assert "ragserve tune --strategies 'epic:first=16'" in str(refused.value)
    assert "eval --data SET --strategies 'full,epic:first=16' --write-gate" in str(refused.value)
    record(place, "abc", {"epic:first=16": entry(GOOD), "concat": entry(figures(f1_vs_full=-45.0))})
    gate.check("epic:first=16")  # without a restart
    with pytest.raises(InvalidRequest, match=r"verified: epic:first=16"):
        gate.check("epic:first=32")
    with pytest.raises(InvalidRequest, match=r"fell short \(set0: F1 97\.5, 45\.0 points below full"):
        gate.check("concat")
    with pytest.raises(InvalidRequest, match="has not been verified"):
        Gate([place], "another model", model="tiny", dtype="float32").check("epic:first=16")


def test_records_add_up_and_the_latest_counts(tmp_path: Path) -> None:
    place, brought = tmp_path / "gate.json", tmp_path / "brought.json"
    record(place, "abc", {"concat": entry(GOOD)})
    record(place, "other", {"concat": entry(GOOD)})
    record(place, "abc", {"concat": entry(figures(f1_vs_full=-9.0)), "epic": entry(GOOD)})
    record(brought, "abc", {"concat": entry(GOOD), "random": entry(GOOD)})
    known = Gate([place, brought, tmp_path / "missing.json"], "abc", model="tiny", dtype="float32").entries()
    assert {label: each.verifies() for label, each in known.items()} == {
        "concat": False,
        "epic": True,
        "random": True,
    }


def test_evaluations_at_the_same_time_lose_no_record(tmp_path: Path) -> None:
    place = tmp_path / "gate.json"
    labels = [f"epic:first={number}" for number in range(40)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda label: record(place, "abc", {label: entry(GOOD)}), labels))
    gate = Gate([place], "abc", model="tiny", dtype="float32")
    assert sorted(gate.verified()) == sorted(labels)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gate.json", "gate.json.lock"]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"version": 9, "models": {}}', '{"version": 1, "models": {"abc": {"concat": 3}}}'],
)
def test_a_file_that_is_no_record_verifies_nothing(tmp_path: Path, text: str) -> None:
    place = tmp_path / "gate.json"
    place.write_text(text)
    with pytest.raises(InvalidRequest, match="has not been verified"):
        Gate([place], "abc", model="tiny", dtype="float32").check("concat")
    if "abc" not in text:
        with pytest.raises(InvalidRequest, match="not a gate's file"):
            record(place, "abc", {"concat": entry(GOOD)})
    assert place.read_text() == text


@pytest.mark.parametrize(
    ("measured_in", "serving", "counts"),
    [
        ("bfloat16", "float32", True),
        ("bfloat16", "float16", True),
        ("float16", "bfloat16", False),
        ("float32", "bfloat16", False),
        ("bfloat16, KV fp8_e5m2", "bfloat16, KV fp8_e5m2", True),
        ("bfloat16", "bfloat16, KV fp8_e5m2", False),
        ("bfloat16, KV fp8_e5m2", "float32", False),
        ("float32", "", False),
    ],
)
def test_a_record_counts_for_the_same_precision_and_finer_ones(
    tmp_path: Path, measured_in: str, serving: str, counts: bool
) -> None:
    record(tmp_path / "gate.json", "abc", {"epic": dataclasses.replace(entry(GOOD), dtype=measured_in)})
    gate = Gate([tmp_path / "gate.json"], "abc", model="tiny", dtype=serving)
    assert gate.verified() == (["epic"] if counts else [])
    if counts:
        gate.check("epic")
    else:
        with pytest.raises(
            InvalidRequest, match=f"verified for tiny in {measured_in}, and this engine computes in {serving}"
        ):
            gate.check("epic")


def test_a_model_brings_the_record_of_another_machine(tmp_path: Path) -> None:
    """As `benchmarks/gpu_eval.py` leaves it: the weights are known by what they are, not by where they lie or
    what computes with them.
    """
    model, elsewhere = tmp_path / "model", tmp_path / "elsewhere"
    for folder in (model, elsewhere):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"weights")
    fingerprint = model_fingerprint(str(elsewhere), "")
    record(
        elsewhere / FILE_NAME,
        fingerprint,
        {"epic": dataclasses.replace(entry(GOOD), hardware="a GPU", dtype="bfloat16")},
    )
    shutil.copy(elsewhere / FILE_NAME, model)
    info = EngineInfo(
        "local",
        str(model),
        str(model),
        "0",
        "cpu",
        "",
        1,
        1,
        ("epic",),
        model_fingerprint(str(model), ""),
        dtype="float32",
    )
    settings = load(data_dir=tmp_path / "data")
    gate_of(settings, info).check("epic")
    record(settings.data_dir / FILE_NAME, info.fingerprint, {"epic": entry(figures(f1_vs_full=-9.0))})
    with pytest.raises(InvalidRequest, match="fell short"):  # here, which is what counts here
        gate_of(settings, info).check("epic")
    (model / "model.safetensors").write_bytes(b"others!")
    other = dataclasses.replace(info, fingerprint=model_fingerprint(str(model), ""))
    with pytest.raises(InvalidRequest, match="has not been verified"):
        Gate.of(
            load(data_dir=tmp_path / "empty"),
            model=other.model,
            fingerprint=other.fingerprint,
            dtype=other.dtype,
            samkv=other.samkv,
        ).check("epic")


def test_a_record_that_could_not_be_read_once_counts_again(tmp_path: Path) -> None:
    place = tmp_path / FILE_NAME
    record(place, "print", {"concat": entry(GOOD)})
    gate = Gate([place], "print", model="tiny", dtype="float32")
    with few_descriptors(0):
        assert gate.verified() == []
    assert gate.verified() == ["concat"]


def test_a_record_is_of_the_attention_that_answered(tmp_path: Path) -> None:
    def gate(sparse: str) -> Gate:
        return Gate([tmp_path / FILE_NAME], "f", model="tiny", dtype="float32", sparse=sparse)

    budget = dataclasses.replace(entry(GOOD), sparse="hierarchical 512")
    record(tmp_path / FILE_NAME, "f", {"concat": entry(GOOD), "cacheblend": budget})
    assert (gate("").verified(), gate(budget.sparse).verified()) == (["concat"], ["cacheblend"])
    with pytest.raises(InvalidRequest, match=r"other sparse attention than the engine has now: .+, now "):
        gate(budget.sparse).check("concat")
