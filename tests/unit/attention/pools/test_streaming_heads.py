"""Pattern files of streaming heads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from sglang_ext.attention.pools.streaming_heads import (
    even_streaming_heads,
    load_pattern,
    save_pattern,
    streaming_heads,
)
from tests.unit.no_room import no_room

GATES = torch.tensor([[0.9, 0.1, 0.5, 0.2], [0.3, 0.8, 0.4, 0.7]])


def test_the_lowest_gates_stream(tmp_path: Path) -> None:
    assert streaming_heads(GATES, 0.5).tolist() == [[False, True, False, True], [True, False, True, False]]
    assert not streaming_heads(GATES, 0).any()
    assert streaming_heads(GATES, 1).all()
    path = tmp_path / "heads.json"
    save_pattern(path, GATES, share=0.5, model="m")
    assert torch.equal(load_pattern(path, 2, 4), streaming_heads(GATES, 0.5))


def test_even_patterns_take_the_lower_gates_of_each_layer() -> None:
    gates = torch.tensor([[0.9, 0.8, 0.1, 0.7], [0.0, 0.0, 0.0, 0.0]])
    assert even_streaming_heads(gates).tolist() == [[False, False, True, True], [True, True, False, False]]


def test_each_rank_has_its_heads(tmp_path: Path) -> None:
    path = tmp_path / "heads.json"
    save_pattern(path, GATES, share=0.5, model="m")
    whole = streaming_heads(GATES, 0.5)
    assert torch.equal(torch.cat([load_pattern(path, 2, 2, rank=r, world=2) for r in range(2)], 1), whole)
    # 8 ranks, 4 heads: two ranks hold the same one
    assert torch.equal(
        torch.cat([load_pattern(path, 2, 1, rank=r, world=8) for r in range(8)], 1),
        whole.repeat_interleave(2, 1),
    )


def test_a_wrong_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "heads.json"
    with pytest.raises(ValueError, match=r"heads\.json is no pattern file"):
        load_pattern(path, 2, 4)
    path.write_text("{}")
    with pytest.raises(ValueError, match="is no pattern file"):
        load_pattern(path, 2, 4)
    save_pattern(path, GATES, share=0.5, model="m")
    with pytest.raises(ValueError, match=r"another model: it has \[2, 4\]"):
        load_pattern(path, 3, 4)
    path.write_text(path.read_text().replace('"v": 1', '"v": 2'))
    with pytest.raises(ValueError, match="version 2"):
        load_pattern(path, 2, 4)
    with pytest.raises(ValueError, match=r"share of 1\.5"):
        streaming_heads(GATES, 1.5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=["nan", "infinite"])
def test_gates_that_are_not_finite_are_neither_written_nor_read(tmp_path: Path, value: float) -> None:
    path = tmp_path / "heads.json"
    broken = GATES.clone()
    broken[1, 2] = value
    with pytest.raises(ValueError, match="not JSON compliant"):
        save_pattern(path, broken, share=0.5, model="m")
    assert not list(tmp_path.iterdir())
    save_pattern(path, GATES, share=0.5, model="m")
    path.write_text(path.read_text().replace("0.4", str(value).replace("nan", "NaN").replace("inf", "1e999")))
    with pytest.raises(ValueError, match=r"heads\.json has gates that are not finite.*make it again with"):
        load_pattern(path, 2, 4)
    path.write_text(path.read_text().replace("NaN", "null").replace("1e999", "null"))
    with pytest.raises(ValueError, match=r"heads\.json is no pattern file"):
        load_pattern(path, 2, 4)


def test_a_pattern_without_room_names_its_file_and_leaves_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "heads.json"
    path.write_text("the one before")
    with pytest.raises(OSError, match=f"'{re.escape(str(path))}'"), no_room():
        save_pattern(path, GATES, share=0.5, model="m")
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [
        ("heads.json", "the one before")
    ]
