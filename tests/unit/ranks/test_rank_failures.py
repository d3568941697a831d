"""Two ranks of a model whose forward pass fails: alike, on one of them, or at different layers."""

from __future__ import annotations

import json
import multiprocessing
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed

from sglang_ext.ranks import rank_failures
from sglang_ext.ranks.rank_failures import FailureVote
from sglang_ext.stages import stages
from tests.unit import request_shapes

LAYERS = 3


class Layer(torch.nn.Module):
    fails = False

    def forward(self) -> None:
        if self.fails:
            raise ValueError("no such row")


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self) -> str:
        for layer in self.layers:
            layer()
        return "computed"


def rank(number: int, folder: Path, failing: list[int | None]) -> None:
    """A rank's process: run the pass as a stage, one of whose layers fails, and then the next pass."""
    rank_failures.WAIT_S = 1.0 if len(set(failing)) > 1 else 240.0  # for who fails alike, later
    store = distributed.FileStore(str(folder / "store"), 2)
    distributed.init_process_group("gloo", store=store, rank=number, world_size=2)
    world, model = distributed.group.WORLD, Model()
    group = SimpleNamespace(world_size=2, rank_in_group=number, cpu_group=world)
    with request_shapes.group(group):
        stages.vote_by(FailureVote(SimpleNamespace(tp_group=group, model=model)).alike)
    said: list[str] = []
    came: dict[str, Any] = {"began": time.monotonic()}

    def collective() -> None:
        """Wait for the others, as every forward pass does."""
        distributed.barrier()

    def run() -> str | None:
        with stages.together():
            return model()  # type: ignore[no-any-return]

    bad = failing[number]
    try:
        if bad is None:
            collective()
        else:
            model.layers[bad].fails = True  # type: ignore[assignment]
            came["failed"] = stages.run("forward", said.append, run)
            model.layers[bad].fails = False  # type: ignore[assignment]
            collective()
        came["next"] = stages.run("forward", said.append, run)
    except stages.RanksDivided as error:
        came["raised"] = str(error.__cause__)
    came["took"] = time.monotonic() - came.pop("began")
    (folder / f"rank{number}").write_text(json.dumps(came | {"said": said}))


def ran(folder: Path, *failing: int | None) -> list[dict[str, Any]]:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=rank, args=(n, folder, list(failing))) for n in range(2)]
    for process in processes:
        process.start()
    failed = [n for n in range(2) if failing[n] is not None]
    for n in failed:
        processes[n].join(240)
    for process in processes:  # what SGLang does when one of them has ended
        process.kill()
        process.join()
    return [json.loads((folder / f"rank{n}").read_text()) for n in failed]


def test_ranks_that_fail_alike_end_the_step_and_go_on(tmp_path: Path) -> None:
    for one in ran(tmp_path, 1, 1):
        assert (one["failed"], one["next"]) == (None, "computed")
        assert "stage 'forward' failed" in one["said"][0]


@pytest.mark.parametrize("failing", [(1, None), (None, 1), (1, 2)], ids=["first", "second", "two layers"])
def test_a_rank_that_fails_by_itself_raises_soon(
    tmp_path: Path, failing: tuple[int | None, int | None]
) -> None:
    for one in ran(tmp_path, *failing):
        assert one["raised"] == "no such row", "SGLang ends the server"
        assert one["said"] == []
        assert one["took"] < 120


def test_a_single_rank_agrees_with_itself() -> None:
    vote = FailureVote(SimpleNamespace(tp_group=None, model=Model()))
    assert vote.alike(ValueError())
