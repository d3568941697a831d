"""Control operation `attend`: a question's attention to parts of turns is that over their keys in the pool,
and parts that the session's key does not hold have none."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
import torch

from sglang_ext.analysis.analyser import Analyser
from sglang_ext.analysis.document_analysis import Cut
from sglang_ext.analysis.forward import Text, run
from sglang_ext.analysis.texts import Texts
from sglang_ext.context.scheduler import session_attention
from sglang_ext.context.scheduler.session_attention import SessionAttention
from sglang_ext.context.selection.choose import Selector
from sglang_ext.ranks.ranks import Ranks
from sglang_ext.tensors.rope import Rotation
from sglang_ext.wire.protocol import PlanError, composed_session_key
from tests.unit.context.small_model import DIM, HEADS, KV_HEADS, runner_of

KEY, SLOTS = "session:n:s", 300
HEAD = [(1, 0), (2, 1)]  # the retrieval heads
FIRST, SECOND = list(range(3, 43)), [*range(3, 20), *range(1, 34)]  # prompts, which begin alike
PARTS = [[0, 4, 27, [0, 6, 15]], [1, 20, 49, [0, 11]]]
QUESTION = [45, 41, 7]
ROTATION = Rotation(torch.tensor([1.0, 0.3, 0.1, 0.02]), DIM, neox=True)


class Tree:
    """Holds the leading tokens of prompts under keys, at drawn slots."""

    def __init__(self) -> None:
        self._slots = torch.randperm(SLOTS)
        self.held: dict[tuple[str, tuple[int, ...]], int] = {}
        self.slots = {tuple(ids): self._slots[n * 60 :][: len(ids)] for n, ids in enumerate((FIRST, SECOND))}

    def leading(self, ids: array[int], extra_key: str) -> list[torch.Tensor]:
        count = self.held.get((extra_key, tuple(ids)), 0)
        own = self.slots[tuple(ids)][:count]
        return list(own.split(7)) if count else []


@pytest.fixture
def tree() -> Tree:
    torch.manual_seed(2)
    return Tree()


@pytest.fixture
def runner() -> Any:
    runner = runner_of(SLOTS, seed=1)
    runner.token_to_kv_pool.head_num, runner.token_to_kv_pool.dtype = KV_HEADS, torch.float32
    return runner


@pytest.fixture
def turns(tree: Tree, runner: Any) -> SessionAttention:
    torch.manual_seed(3)
    unrelated = [torch.randint(0, 40, (20,)).tolist() for _ in range(2)]
    texts = Texts(unrelated, torch.zeros(50, dtype=torch.bool))
    ranks = Ranks()
    analyser = Analyser(runner, lambda: texts, Cut(), heads=HEAD, rotation=ROTATION)
    return SessionAttention(
        runner,
        tree,
        rotation=ROTATION,
        analyser=analyser,
        selector=Selector(ROTATION, analyser, ranks),
        ranks=ranks,
    )


def ask(turns: SessionAttention, **more: Any) -> list[list[float] | None]:
    body = {"key": KEY, "prompts": [FIRST, SECOND], "question": QUESTION, "parts": PARTS, **more}
    return list(turns.answer(body)["attention"])


def query_of(runner: Any, slots: torch.Tensor, ids: list[int]) -> torch.Tensor:
    """f32 [layers, heads, head_dim]: the query of the last of ``ids`` behind the tokens in ``slots``."""
    pool, found = runner.token_to_kv_pool, []
    text = Text(
        torch.tensor(ids),
        len(slots) + torch.arange(len(ids)),
        lambda layer: (pool.get_key_buffer(layer)[slots], pool.get_value_buffer(layer)[slots]),
    )
    run(runner, [text], lambda layer, states: found.append(states[0].q[-1]))
    return torch.stack(found)


def hold(tree: Tree, first: int, second: int, key: str = KEY) -> None:
    tree.held = {(key, tuple(FIRST)): first, (key, tuple(SECOND)): second}


@pytest.mark.parametrize("held", [len(SECOND), len(SECOND) - 1], ids=["all", "but one"])
def test_the_attention_is_that_of_the_question_behind_the_last_prompt(
    tree: Tree, runner: Any, turns: SessionAttention, held: int
) -> None:
    """Against a loop over heads and tokens, every key at its place in one row that ends at the question."""
    hold(tree, len(FIRST), held)
    first, second = (tree.slots[tuple(ids)] for ids in (FIRST, SECOND))
    rows = torch.cat((first[4:27], second[20:49]))
    places = torch.cat((torch.arange(4, 27), torch.arange(20, 49)))
    start = len(SECOND)  # of the question
    at = torch.arange(start - len(rows), start)
    query = query_of(runner, second[:held], [*SECOND[held:], *QUESTION])
    total = torch.zeros(len(rows))
    parked = torch.zeros(len(rows), dtype=torch.bool)
    parked[[0, 1, 2, 23, 24, 25]] = True
    for layer, head in HEAD:
        keys = runner.token_to_kv_pool.get_key_buffer(layer)[rows, head][:, None]
        keys = ROTATION.rotate(keys, at - places)[:, 0]
        group = query[layer].view(KV_HEADS, HEADS // KV_HEADS, DIM)[head]
        shares = [(keys @ q / DIM**0.5).masked_fill(parked, -1e9).softmax(0) for q in group]
        total += torch.stack(shares).amax(0)
    total[parked] = 0
    bounds = [(0, 6), (6, 15), (15, 23), (23, 34), (34, 52)]
    best = torch.stack([total[a:b].max() for a, b in bounds])
    wanted = (best / best.max()) ** 0.5
    got = ask(turns)
    assert [len(part or ()) for part in got] == [3, 2]
    assert [share for part in got for share in part or ()] == pytest.approx(wanted.tolist(), abs=0.02)
    assert max(max(part or ()) for part in got) == 1


def test_parts_without_all_of_their_kv_have_none(tree: Tree, turns: SessionAttention) -> None:
    assert ask(turns) == [None, None]
    hold(tree, 26, 49)
    first, second = ask(turns)
    assert first is None, "one token is missing"
    assert len(second or ()) == 2
    hold(tree, len(FIRST), 30, composed_session_key(KEY))
    first, second = ask(turns)
    assert len(first or ()) == 3, "composed turns lie under a key of their own"
    assert second is None
    assert ask(turns, key="session:n:other") == [None, None]


def test_no_more_than_the_most_tokens_are_computed(
    tree: Tree, turns: SessionAttention, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_attention, "_MOST_TOKENS", 8 + len(QUESTION))
    hold(tree, len(FIRST), len(SECOND) - 8)
    assert None not in ask(turns, parts=PARTS[:1])
    assert ask(turns, question=[*QUESTION, 1]) == [None, None]
    hold(tree, len(FIRST), len(SECOND) - 9)
    assert ask(turns) == [None, None], "the end of the last prompt is not held"


@pytest.mark.parametrize("lacks", [2, 7])
def test_what_the_tokens_attend_to_counts_on_a_cpu(
    tree: Tree, turns: SessionAttention, monkeypatch: pytest.MonkeyPatch, lacks: int
) -> None:
    """As many tokens are computed behind little as are too many behind much."""
    monkeypatch.setattr(session_attention, "PAIRS_PER_ROW", 1)
    before, rows = len(SECOND) - lacks, lacks + len(QUESTION)
    hold(tree, len(FIRST), before)
    parts, work = PARTS[:1], rows * (1 + before + rows / 2)
    monkeypatch.setattr(session_attention, "_CPU_MOST_WORK", work)
    assert None not in ask(turns, parts=parts)
    monkeypatch.setattr(session_attention, "_CPU_MOST_WORK", work - 1)
    assert ask(turns, parts=parts) == [None]
    fewer = [FIRST, SECOND[:4]]
    tree.slots[tuple(SECOND[:4])] = tree.slots[tuple(SECOND)][:4]
    assert None not in ask(turns, parts=parts, prompts=fewer, question=[1] * rows), "behind nothing"


def test_another_question_attends_elsewhere(tree: Tree, turns: SessionAttention) -> None:
    hold(tree, len(FIRST), len(SECOND))
    assert ask(turns) != ask(turns, question=[12, 30])
    assert ask(turns) == ask(turns, question=QUESTION)


@pytest.mark.parametrize(
    "wrong",
    [
        {"question": []},
        {"prompts": [], "parts": []},
        {"parts": [[2, 0, 5, [0]]]},
        {"parts": [[0, 5, 5, [0]]]},
        {"parts": [[0, 0, 999, [0]]]},
        {"parts": [[0, 0, 9, []]]},
        {"parts": [[0, 0, 9, [1]]]},
        {"parts": [[0, 0, 9, [0, 9]]]},
        {"parts": [[0, 0, 9, [0, 4, 4]]]},
        {"parts": [[0, 0, 9]]},
        {"parts": [["a", 0, 9, [0]]]},
    ],
    ids=str,
)
def test_what_is_no_question_about_turns_is_refused(
    tree: Tree, turns: SessionAttention, wrong: dict[str, Any]
) -> None:
    hold(tree, len(FIRST), len(SECOND))
    with pytest.raises(PlanError, match=r"part of a turn|question with tokens"):
        ask(turns, **wrong)
