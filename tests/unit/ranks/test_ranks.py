"""Votes of two processes: what the lower vote decides, what travels, and a failure of one of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed

from sglang_ext.ranks import shared_ballots
from sglang_ext.ranks.ranks import Ranks
from sglang_ext.ranks.shared_ballots import LARGEST, SharedBallots
from sglang_ext.stages.stages import ELSEWHERE
from tests.unit.context.composed_cases import SLOTS, Case, composer_of
from tests.unit.context.small_model import runner_of

MANY = 5000  # questions: more than one round has room for


def votes(rank: int, ranks: Ranks) -> Any:
    """Votes in which now this rank is lower and now the other; some values are the same and some are not."""
    several = [ranks.min_votes([rank, 1 - rank, 7, LARGEST - rank]) for _ in range(300)]
    many = ranks.min_votes([number % 11 + rank for number in range(MANY)])
    agreed = [ranks.all_agree(True), ranks.all_agree(rank == 1), ranks.min_votes([])]
    return several, sum(many), agreed


def contents(value: str | None) -> bytes:
    return repr(value).encode()


def firsts(rank: int, ranks: Ranks) -> Any:
    return ranks.first_each(["same", f"of {rank}", None if rank else "here", "too"], contents)


def gathered(rank: int, ranks: Ranks) -> Any:
    return ranks.gather({"of": rank}), ranks.gather({"of": "all"})


def failing_gather(rank: int, ranks: Ranks) -> Any:
    """Fill contexts whose gather fails on the second rank only, where it is planned and where it is launched;
    the first would go on to a pass.
    """
    composer, said = composer_of(runner_of(SLOTS), ranks=ranks), []
    for launched in (False, True):
        case = Case([{"recompute": "all"}], 3)
        if rank and launched:
            composer.gather = None  # type: ignore[assignment]
        elif rank:
            case.contexts[0].located.sources = None
        with pytest.raises((RuntimeError, TypeError)) as failed:
            composer.fill(case.contexts, case.rows)
        said.append(str(failed.value))
    return said


WORK: dict[str, Callable[[int, Ranks], Any]] = {
    "votes": votes,
    "firsts": firsts,
    "gathered": gathered,
    "gather": failing_gather,
}


def one_of_two(rank: int, folder: Path) -> None:
    store = f"file://{folder / 'rendezvous'}"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    torch.set_num_threads(1)
    world = distributed.group.WORLD
    group = SimpleNamespace(world_size=2, rank_in_group=rank, cpu_group=world, device_group=world)
    by_gloo, shared = Ranks(group), Ranks.voting(group)
    found = {f"{name} by gloo": work(rank, by_gloo) for name, work in WORK.items()}
    found |= {f"{name} shared": work(rank, shared) for name, work in WORK.items()}
    group.cpu_group = None  # votes, and values that are the same, take nothing but the shared memory
    found["no group"] = [
        *(shared.min_votes([3 - rank]), shared.first_each(["same"], contents)),
        shared.gather(({"tokens": 3}, "")),
    ]
    (folder / f"{rank}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def found(two_ranks: Callable[..., None], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """By rank, what it found by gloo and in shared memory."""
    folder = tmp_path_factory.mktemp("ranks")
    two_ranks(one_of_two, folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("way", ["by gloo", "shared"])
def test_the_lowest_vote_of_any_rank_counts(found: list[dict[str, Any]], way: str) -> None:
    wanted = [[[0, 0, 7, LARGEST - 1]] * 300, sum(n % 11 for n in range(MANY)), [True, False, []]]
    assert [own[f"votes {way}"] for own in found] == [wanted] * 2


@pytest.mark.parametrize("way", ["by gloo", "shared"])
def test_the_first_ranks_values_count(found: list[dict[str, Any]], way: str) -> None:
    assert [own[f"firsts {way}"] for own in found] == [["same", "of 0", "here", "too"]] * 2


@pytest.mark.parametrize("way", ["by gloo", "shared"])
def test_every_ranks_value_is_gathered(found: list[dict[str, Any]], way: str) -> None:
    assert [own[f"gathered {way}"] for own in found] == [[[{"of": 0}, {"of": 1}], [{"of": "all"}] * 2]] * 2


def test_nothing_but_votes_travels_for_what_is_the_same(found: list[dict[str, Any]]) -> None:
    assert [own["no group"] for own in found] == [[[2], ["same"], [[{"tokens": 3}, ""]] * 2]] * 2


@pytest.mark.parametrize("way", ["by gloo", "shared"])
def test_a_gather_that_fails_on_one_rank_fails_before_the_passes(
    found: list[dict[str, Any]], way: str
) -> None:
    assert found[0][f"gather {way}"] == [ELSEWHERE] * 2
    planned, launched = found[1][f"gather {way}"]
    assert "not iterable" in planned
    assert "not callable" in launched


def test_memory_for_votes_is_there_before_the_first_vote() -> None:
    """A file with holes ends the process that writes to it once the folder is full."""
    path = SharedBallots.create(2)
    size, blocks = path.stat().st_size, path.stat().st_blocks
    path.unlink()
    assert 512 * blocks >= size > 0


def test_a_rank_that_never_votes_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_ballots, "_PATIENCE_S", 0.01)
    path = SharedBallots.create(2)
    alone = SharedBallots(path, 0, 2)
    path.unlink()
    with pytest.raises(TimeoutError, match="did not vote"):
        alone.lowest([1])
    assert not path.exists()


def test_a_single_rank_decides_by_itself() -> None:
    ranks = Ranks.voting()
    assert ranks.min_votes([4, 0]) == [4, 0]
    assert ranks.first_each(["own", None], contents) == ["own", None]
