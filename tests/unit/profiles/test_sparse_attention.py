"""What `--sparse-attention auto` takes of a record: what holds on every set that can show a loss."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from ragserve.config import Settings, load
from ragserve.engine.cpu_precision import cpu_dtype
from ragserve.engine.server_args import expected_dtype, resolve_sparse_attention, sparse_defaults
from ragserve.profiles.prefill_crossover import FILE_NAME as PREFILL_FILE
from ragserve.profiles.prefill_crossover import PREFILL, PrefillPoint, PrefillProfile, options_of
from ragserve.profiles.sparse_attention import (
    FILE_NAME,
    SPARSE,
    SparseEntry,
    SparseFigures,
    SparseRecord,
    under,
)
from sglang_ext.documents.fingerprint import model_fingerprint
from tests.conftest import MODEL

FINE = SparseFigures(n=200, dense=60.0, score=59.5, loss_bound=2.0, prompt_tokens=8000, read=0.25)
BUDGET = {"decode_mode": "hierarchical", "decode_budget": 2048}
LINES = {"prefill_mode": "vertical_slash", "prefill_alpha": 0.9}
FINGERPRINT = model_fingerprint(str(MODEL))


def record(*entries: SparseEntry, **more: object) -> SparseRecord:
    settings = load(model=str(MODEL), **more)
    return SparseRecord(under(settings), entries, "float32", "ragserve-tiny", "a CPU", "2026-11-29")


def auto(folder: Path, **more: object) -> tuple[Settings, str]:
    fixed: dict[str, Any] = {"model": str(MODEL), "data_dir": folder, "dtype": "float32"}
    given = load(**{**fixed, "sparse_attention": "auto", **more})
    return resolve_sparse_attention(given)


@pytest.mark.parametrize(
    ("figures", "reason"),
    [
        (FINE, None),
        (replace(FINE, score=58.5), "1.5 points below dense"),
        (replace(FINE, loss_bound=6.0), "at 95 % at most 6"),
        (replace(FINE, n=99), "fewer than 100"),
        (replace(FINE, failed=3), "3 questions failed"),
        (replace(FINE, failed=3, read=0.9), "3 questions failed"),
        (replace(FINE, score=70.0), None),
        (replace(FINE, dense=15.0, score=1.0), "no set"),
        (replace(FINE, read=0.9), "no set"),
    ],
)
def test_what_holds(figures: SparseFigures, reason: str | None) -> None:
    found = SparseEntry(BUDGET, {"lines": figures}).shortfalls()
    assert not found if reason is None else reason in "; ".join(found)


def test_one_set_that_loses_is_enough() -> None:
    entry = SparseEntry(BUDGET, {"lines": FINE, "kv": replace(FINE, score=50.0)})
    assert [line.partition(":")[0] for line in entry.shortfalls()] == ["kv"]


def test_the_best_changes_most_and_reads_least() -> None:
    small = SparseEntry({**BUDGET, "decode_budget": 512}, {"lines": replace(FINE, score=40.0)})
    middle = SparseEntry({**BUDGET, "decode_budget": 1024}, {"lines": replace(FINE, read=0.1)})
    large = SparseEntry(BUDGET, {"lines": FINE})
    both = SparseEntry({**BUDGET, "prefill_mode": "vertical_slash", "prefill_alpha": 0.9}, {"lines": FINE})
    assert record(small, middle, large).best() is middle
    assert record(small, middle, large, both).best() is both
    assert record(small).best() is None


def test_auto_without_a_record_is_off_and_says_so(tmp_path: Path) -> None:
    settings, why = auto(tmp_path)
    assert settings.sparse_attention == "off"
    assert why.startswith("dense")
    assert "ragserve calibrate --part sparse" in why


def test_auto_takes_what_holds_and_nothing_else(tmp_path: Path) -> None:
    SPARSE.save(tmp_path / FILE_NAME, FINGERPRINT, record(SparseEntry(BUDGET, {"lines": FINE})))
    settings, why = auto(tmp_path)
    assert (settings.sparse_attention, settings.decode_mode, settings.decode_budget) == (
        "on",
        "hierarchical",
        2048,
    )
    assert settings.prefill_mode == "dense"
    assert "lines (200, at 95 % at most 2)" in why
    assert resolve_sparse_attention(settings) == (settings, "")


def test_a_budget_recorded_for_prefill_alone_leaves_decoding_dense(tmp_path: Path) -> None:
    SPARSE.save(tmp_path / FILE_NAME, FINGERPRINT, record(SparseEntry(LINES, {"lines": FINE})))
    settings, _ = auto(tmp_path, prefill_dense_below=0)
    assert (settings.decode_mode, settings.prefill_mode) == ("dense", "vertical_slash")


def test_what_fell_short_or_was_measured_otherwise_is_not_taken(tmp_path: Path) -> None:
    lost = SparseEntry(BUDGET, {"lines": replace(FINE, score=40.0)})
    SPARSE.save(tmp_path / FILE_NAME, FINGERPRINT, record(lost))
    assert auto(tmp_path)[0].sparse_attention == "off"
    SPARSE.save(tmp_path / FILE_NAME, FINGERPRINT, record(SparseEntry(BUDGET, {"lines": FINE})))
    settings, why = auto(tmp_path, decode_page_size=16)
    assert settings.sparse_attention == "off"
    assert "decode_page_size" in why


def test_prefill_that_would_be_off_is_left_out(tmp_path: Path) -> None:
    alone, budget, both = ({"lines": FINE}, {"lines": replace(FINE, read=0.5)}, {"lines": FINE})
    entries = [SparseEntry(LINES, alone), SparseEntry(BUDGET, budget), SparseEntry(BUDGET | LINES, both)]
    SPARSE.save(tmp_path / FILE_NAME, FINGERPRINT, record(*entries))
    settings, why = auto(tmp_path)
    assert (settings.decode_mode, settings.prefill_mode) == ("hierarchical", "dense")
    assert "not decode_mode=hierarchical decode_budget=2048 prefill_mode=vertical_slash" in why
    assert "run ragserve calibrate --part prefill" in why
    SPARSE.save(tmp_path / FILE_NAME, FINGERPRINT, record(entries[0]))
    settings, why = auto(tmp_path)
    assert settings.sparse_attention == "off"
    assert "sparse prefill would be off" in why

    options = options_of(load(sparse_attention="on", **LINES))
    known = PrefillProfile(3000, options, (PrefillPoint(4096, 10, 5, 0.5),), "m", "h", "d")
    PREFILL.save(tmp_path / PREFILL_FILE, FINGERPRINT, known)
    settings, _ = auto(tmp_path)
    assert (settings.prefill_mode, settings.prefill_dense_below) == ("vertical_slash", 3000)


@pytest.mark.parametrize(
    ("measured", "more", "serves"),
    [
        ("float32", {"dtype": "float32"}, True),
        ("float32", {"dtype": "bfloat16"}, False),
        ("bfloat16", {"dtype": "float32"}, True),
        ("bfloat16", {"dtype": "bfloat16"}, True),
        ("bfloat16", {"dtype": "bfloat16", "engine_args": {"kv_cache_dtype": "fp8_e5m2"}}, False),
        ("bfloat16, KV fp8_e5m2", {"engine_args": {"kv_cache_dtype": "fp8_e5m2", "dtype": "half"}}, False),
        ("float16, KV fp8_e5m2", {"engine_args": {"kv_cache_dtype": "fp8_e5m2", "dtype": "half"}}, True),
    ],
)
def test_a_record_is_for_its_precision_and_finer_ones(
    tmp_path: Path, measured: str, more: dict[str, Any], serves: bool
) -> None:
    found = replace(record(SparseEntry(BUDGET, {"lines": FINE})), dtype=measured)
    SPARSE.save(tmp_path / FILE_NAME, FINGERPRINT, found)
    settings, why = auto(tmp_path, **more)
    assert settings.sparse_attention == ("on" if serves else "off")
    assert serves or f"measured in {measured}" in why


@pytest.mark.parametrize(
    "wrong",
    [
        {"engine_args": {"trust_remote_code": True}},
        {"decode_budget": "2048"},
        {"decode_budget": 0},
        {"decode_mode": "fast"},
        {"prefill_alpha": 2.0},
    ],
)
def test_a_record_sets_nothing_but_sparse_attention(
    tmp_path: Path, wrong: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / FILE_NAME
    SPARSE.save(place, FINGERPRINT, record(SparseEntry(BUDGET, {"lines": FINE})))
    text = json.loads(place.read_text())
    text["models"][FINGERPRINT]["entries"][0]["settings"] |= wrong
    place.write_text(json.dumps(text))
    settings, why = auto(tmp_path)
    assert (settings.sparse_attention, settings.engine_args) == ("off", {})
    assert next(iter(wrong)) in caplog.text
    assert "of the data folder is no record" in why
    assert str(tmp_path) not in why


def test_settings_that_conflict_with_the_servers_are_not_taken(tmp_path: Path) -> None:
    found = record(SparseEntry(LINES, {"lines": FINE}), kv_bits=8, sparse_attention="on")
    SPARSE.save(tmp_path / FILE_NAME, FINGERPRINT, found)
    given = load(model=str(MODEL), data_dir=tmp_path, dtype="float32")
    update = {"kv_bits": 8, "sparse_attention": "auto", "prefill_dense_below": 0}
    settings, why = resolve_sparse_attention(given.model_copy(update=update))
    assert settings.sparse_attention == "off"
    assert "omit kv_bits" in why


@pytest.mark.parametrize("first", ["page size", "version", "foreign", "folder"])
def test_the_models_folder_is_asked_after_what_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    monkeypatch.setattr("sglang_ext.documents.fingerprint.model_fingerprint", lambda *_, **__: FINGERPRINT)
    data, model = tmp_path / "data", tmp_path / "model"
    here, entry = data / FILE_NAME, SparseEntry(BUDGET, {"lines": FINE})
    SPARSE.save(here, FINGERPRINT, record(entry, decode_page_size=16))
    if first == "version":
        here.write_text(json.dumps({"version": 99, "models": {}}))
    elif first == "foreign":
        here.write_text("[]")
    elif first == "folder":
        here.unlink()
        here.mkdir()
    settings, why = auto(data, model=str(model))
    assert settings.sparse_attention == "off"
    assert (why.startswith("dense: "), "ragserve calibrate --part sparse" in why) == (True, True)
    SPARSE.save(model / FILE_NAME, FINGERPRINT, record(entry))
    assert auto(data, model=str(model))[0].sparse_attention == "on"


@pytest.mark.parametrize("more", [{"kv_bits": 8}, {"kv_offload_bytes": 1}, {"decode_heads": "heads.json"}])
def test_auto_goes_with_no_setting_that_its_record_does_not_know(more: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="--sparse-attention on"):
        load(sparse_attention="auto", **more)


def test_what_an_engine_will_compute_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def expected(model: object = MODEL, **more: Any) -> str:
        return expected_dtype(load(model=str(model), **more))

    assert expected(dtype="float16") == "float16"
    assert expected(engine_args={"dtype": "bfloat16", "kv_cache_dtype": "auto"}) == "bfloat16"
    assert expected() == cpu_dtype()[0]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for name, dtype in (("a", "bfloat16"), ("b", "float32")):
        (tmp_path / name).mkdir()
        config = {"model_type": "llama", "dtype": dtype}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    assert (expected(tmp_path / "a"), expected(tmp_path / "b")) == ("bfloat16", "float16")
    assert expected(tmp_path / "none") == "unknown"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"sparse_attention": "off"}, ""),
        ({"decode_mode": "dense"}, ""),
        ({**BUDGET}, "hierarchical 2048"),
        ({"decode_mode": "progressive"}, f"progressive {load().decode_threshold:g}"),
        ({"decode_mode": "dense", **LINES}, ""),
        ({**BUDGET, **LINES, "prefill_dense_below": 0}, "hierarchical 2048, vertical_slash 0.9"),
    ],
)
def test_verdicts_name_the_attention_that_answers(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    settings = load(**{"model": str(MODEL), "data_dir": tmp_path, "sparse_attention": "on", **given})
    assert sparse_defaults(settings) == said
