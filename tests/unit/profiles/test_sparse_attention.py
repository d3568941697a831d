"""What `--sparse-attention auto` takes of a record: what holds on every set that can show a loss."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from ragserve.config import Settings, load
from ragserve.engine.server_args import resolve_sparse_attention
from ragserve.errors import InvalidRequest
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
FINGERPRINT = model_fingerprint(str(MODEL))


def record(*entries: SparseEntry, **more: object) -> SparseRecord:
    settings = load(model=str(MODEL), **more)
    return SparseRecord(under(settings), entries, "float32", "ragserve-tiny", "a CPU", "2026-11-29")


def auto(folder: Path, **more: object) -> tuple[Settings, str]:
    given = load(model=str(MODEL), data_dir=folder, sparse_attention="auto", **more)
    return resolve_sparse_attention(given)


@pytest.mark.parametrize(
    ("figures", "reason"),
    [
        (FINE, None),
        (replace(FINE, score=58.5), "1.5 points below dense"),
        (replace(FINE, loss_bound=6.0), "at 95 % at most 6"),
        (replace(FINE, n=99), "fewer than 100"),
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
    assert "lines (200)" in why
    assert resolve_sparse_attention(settings) == (settings, "")


def test_a_budget_recorded_for_prefill_alone_leaves_decoding_dense(tmp_path: Path) -> None:
    lines = SparseEntry({"prefill_mode": "vertical_slash", "prefill_alpha": 0.9}, {"lines": FINE})
    SPARSE.save(tmp_path / FILE_NAME, FINGERPRINT, record(lines))
    settings, _ = auto(tmp_path)
    assert (settings.decode_mode, settings.prefill_mode) == ("dense", "vertical_slash")


def test_what_fell_short_or_was_measured_otherwise_is_not_taken(tmp_path: Path) -> None:
    lost = SparseEntry(BUDGET, {"lines": replace(FINE, score=40.0)})
    SPARSE.save(tmp_path / FILE_NAME, FINGERPRINT, record(lost))
    assert auto(tmp_path)[0].sparse_attention == "off"
    SPARSE.save(tmp_path / FILE_NAME, FINGERPRINT, record(SparseEntry(BUDGET, {"lines": FINE})))
    settings, why = auto(tmp_path, decode_page_size=16)
    assert settings.sparse_attention == "off"
    assert "decode_page_size" in why


def test_a_foreign_file_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text("[]")
    with pytest.raises(InvalidRequest, match="record of sparse attention"):
        auto(tmp_path)


@pytest.mark.parametrize("more", [{"kv_bits": 8}, {"kv_offload_bytes": 1}, {"decode_heads": "heads.json"}])
def test_auto_goes_with_no_setting_that_its_record_does_not_know(more: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="--sparse-attention on"):
        load(sparse_attention="auto", **more)
