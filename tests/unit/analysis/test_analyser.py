"""Analyses of a batch against the model run over whole texts, in plain loops."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ragserve_kernels.block_summary import BlockPlan, block_summary_naive
from ragserve_kernels.block_summary import pieces as block_summary_pieces
from sglang_ext.analysis import forward
from sglang_ext.analysis.analyser import Analyser, DocumentPart
from sglang_ext.analysis.document_analysis import Analysis, Cut
from sglang_ext.analysis.retrieval_heads import best_layers
from sglang_ext.analysis.texts import Texts
from tests.analyses import local_queries, mean_keys
from tests.unit.context.small_model import DIM, HEADS, KV_HEADS, LAYERS, ROTATION, VOCABULARY, runner_of

GROUP = HEADS // KV_HEADS
Layer = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def over_whole_text(runner: Any, ids: list[int]) -> list[Layer]:
    """Q, K and V [n, heads, head_dim] of every layer of a prefill with causal attention, in float64."""
    model = runner.model.model
    hidden = model.embed_tokens(torch.tensor(ids)).double()
    positions, found = torch.arange(len(ids)), []
    future = torch.ones(len(ids), len(ids)).triu(1).bool()
    for layer in model.layers:
        q, k, v = (hidden @ projection.double() for projection in layer._projections)
        q = q.view(-1, HEADS, DIM)
        k, v = ((part.view(-1, KV_HEADS, DIM)) for part in (k + positions[:, None] / 100, v))
        found.append((q, k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(GROUP, 1)) * DIM**-0.5
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        out = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(GROUP, 1))
        hidden = hidden + out.flatten(1) @ layer._out.double()
    return found


def behind_text(runner: Any, before: list[int], ids: list[int]) -> list[Layer]:
    """Q, K and V of ``ids`` behind a text, with keys as at positions from 0 on."""
    n = len(before)
    return [(q[n:], k[n:] - n / 100, v[n:]) for q, k, v in over_whole_text(runner, before + ids)]


def drawn(n: int, seed: int) -> list[int]:
    return [int(i) for i in torch.randint(0, VOCABULARY, (n,), generator=torch.Generator().manual_seed(seed))]


@pytest.mark.parametrize(
    ("lengths", "behind"),
    [((63,), (90, 37)), ((1, 111, 2, 40, 64), (37, 90)), ((129, 7), (64, 1, 33))],
    ids=str,
)
@pytest.mark.parametrize(
    ("rows", "pairs"), [(8192, 2**23), (50, 2**23), (50, 300)], ids=["at once", "in steps", "in small steps"]
)
@pytest.mark.parametrize("prefixed", [False, True], ids=["alone", "behind a prefix"])
def test_a_batch_has_the_values_of_whole_texts(
    lengths: tuple[int, ...],
    behind: tuple[int, ...],
    rows: int,
    pairs: int,
    prefixed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forward, "CPU_ROWS", rows)
    monkeypatch.setattr(forward, "_CPU_PAIRS", pairs)
    monkeypatch.setattr(forward, "_KEPT_MASK", pairs // 2)
    monkeypatch.setattr(block_summary_pieces, "_CPU_SCORES", pairs)
    seed = sum(lengths)
    runner = runner_of(8, seed)
    runner.token_to_kv_pool.head_num, runner.token_to_kv_pool.dtype = KV_HEADS, torch.float32
    unrelated = [drawn(n, seed + n) for n in behind]
    heads = [(0, 1), (2, 0)]
    texts = Texts(unrelated, torch.zeros(VOCABULARY, dtype=torch.bool))
    before = drawn(behind[1], seed + 7) if prefixed else unrelated[0]
    prefix = before if prefixed else []
    analyser = Analyser(runner, lambda: texts, Cut(), heads, rotation=ROTATION, prefix=prefix)
    documents = [drawn(n, seed + 1000 * i) for i, n in enumerate(lengths)]
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    found = analyser.analyse_all(documents, keep=lambda layer, k, v: kept.append((k.clone(), v.clone())))
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    for ids, start, analysis in zip(documents, starts, found, strict=True):
        n, alone = len(ids), over_whole_text(runner, ids)
        placed = behind_text(runner, before, ids)
        moved = torch.zeros(n, dtype=torch.float64)
        for (_, _, v), (_, _, was) in zip(placed, alone, strict=True):
            moved += (v - was).square().sum((1, 2))
        wanted_of = placed if prefixed else alone
        torch.testing.assert_close(analysis.sensitivity.double(), moved, rtol=1e-3, atol=1e-6)
        plan = BlockPlan.build([n], block_tokens=analysis.block, local_blocks=analysis.local_blocks)
        for layer, (q, k, v) in enumerate(wanted_of):
            own_k, own_v = (part[start : start + n] for part in kept[layer])
            torch.testing.assert_close(own_k.double(), k, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(own_v.double(), v, rtol=1e-4, atol=1e-5)
            wanted = block_summary_naive(q, k, plan, scale=DIM**-0.5)
            torch.testing.assert_close(analysis.attention[layer], wanted.attention, rtol=1e-3, atol=1e-6)
            torch.testing.assert_close(
                analysis.exponent[layer].float(), wanted.exponent, rtol=1e-2, atol=1e-2
            )
            assert analysis.token[layer].tolist() == (
                (wanted.token - plan.block_start[:-1]).clamp(min=0).tolist()
            )
            near = {"rtol": 0.0, "atol": 0.02 * float(k.abs().max())}
            torch.testing.assert_close(mean_keys(analysis)[layer], wanted.mean_k, **near)
            near = {"rtol": 0.0, "atol": 0.02 * float(q.abs().max())}
            torch.testing.assert_close(local_queries(analysis)[layer], wanted.local_q[0], **near)
        keys = analysis.token_k.float() * analysis.token_k_scale.float()[..., None]
        for number, (layer, head) in enumerate(heads):
            torch.testing.assert_close(
                keys[:, number].double(), wanted_of[layer][1][:, head], rtol=0.0, atol=0.05
            )
    assert len(kept) == LAYERS


def analyser_of(seed: int) -> Analyser:
    """With a prefix."""
    runner = runner_of(8, seed)
    runner.token_to_kv_pool.head_num, runner.token_to_kv_pool.dtype = KV_HEADS, torch.float32
    texts = Texts([drawn(20, 1), drawn(20, 2)], torch.zeros(VOCABULARY, dtype=torch.bool))
    return Analyser(runner, lambda: texts, Cut(), [(0, 1), (2, 0)], rotation=ROTATION, prefix=drawn(33, 6))


@pytest.mark.parametrize("lengths", [(257,), (63, 1, 111), (129, 7)], ids=str)
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "part"])
def test_a_pass_between_whose_pieces_others_run_has_the_values_of_one_in_one_go(
    lengths: tuple[int, ...], whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "CPU_ROWS", 50)
    monkeypatch.setattr(forward, "_CPU_PAIRS", 1000)
    monkeypatch.setattr(block_summary_pieces, "_CPU_SCORES", 500)
    monkeypatch.setattr(block_summary_pieces, "_TOKENS", 2)
    seed = sum(lengths)
    analyser = analyser_of(seed)
    documents = [drawn(n, seed + n) for n in lengths]
    wanted = analyser.analyse_all(documents, whole=whole)
    divided = [analyser.in_pieces(documents, whole=whole) for _ in range(2)]  # the second is behind the first
    other, found, work = drawn(31, seed), [], [0.0, 0.0]
    while len(found) < 2:
        for number, steps in enumerate(divided):
            try:
                work[number] += next(steps)
            except StopIteration as end:
                found.append(end.value)
        analyser.analyse(other)
    for one in found:
        for own, was in zip(one, wanted, strict=True):
            assert own.encode() == was.encode()
    assert work[0] == work[1] >= seed, "in tokens"


def test_no_piece_of_a_pass_has_more_rows_or_pairs_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "CPU_ROWS", 50)
    monkeypatch.setattr(forward, "_CPU_PAIRS", 1000)
    lengths = (257, 3, 111)
    seen = [range(n)[i] + 1 for n in lengths for i in range(n)]
    chunks = list(forward._chunks(lengths, on_cpu=True))
    assert [i for rows, _ in chunks for i in range(rows.start, rows.stop)] == list(range(sum(lengths)))
    for rows, pairs in chunks:
        assert rows.stop - rows.start <= 50
        assert pairs == sum(seen[rows]) <= 1000
    assert len(list(forward._chunks(lengths, on_cpu=False))) == 1


def test_without_sensitivity_one_copy_is_computed_and_all_else_is_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows: list[int] = []

    def counted(runner: Any, texts: Any, observe: Any) -> Iterator[float]:
        rows.append(sum(len(text.ids) for text in texts))
        return forward.pieces(runner, texts, observe)

    runner = runner_of(8, 9)
    runner.token_to_kv_pool.head_num, runner.token_to_kv_pool.dtype = KV_HEADS, torch.float32
    prefix, documents = drawn(33, 6), [drawn(63, 7), drawn(1, 8), drawn(40, 9)]
    texts = Texts([drawn(20, 1), drawn(20, 2)], torch.zeros(VOCABULARY, dtype=torch.bool))
    analyser = Analyser(runner, lambda: texts, Cut(), [(0, 1)], rotation=ROTATION, prefix=prefix)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    whole = analyser.analyse_all(documents, keep=lambda layer, k, v: kept.append((k.clone(), v.clone())))
    monkeypatch.setattr("sglang_ext.analysis.analyser.pieces", counted)
    again: list[tuple[torch.Tensor, torch.Tensor]] = []
    part = analyser.analyse_all(
        documents, keep=lambda layer, k, v: again.append((k.clone(), v.clone())), whole=False
    )
    assert rows == [104]
    for one, other in zip(whole, part, strict=True):
        assert (one.is_whole, other.is_whole) == (True, False)
        decoded = Analysis.decode(other.encode(), other.n_tokens)
        for name, wanted in one.part()._tensors().items():
            torch.testing.assert_close(getattr(decoded, name), wanted, rtol=1e-4, atol=1e-5)
    for (k, v), (k2, v2) in zip(kept, again, strict=True):
        torch.testing.assert_close(k, k2, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(v, v2, rtol=1e-4, atol=1e-5)


def test_with_given_heads_only_the_text_before_documents_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []

    def counted(runner: Any, texts: Any, observe: Any) -> Iterator[float]:
        computed.append(sum(len(text.ids) for text in texts))
        yield from forward.pieces(runner, texts, observe)

    monkeypatch.setattr("sglang_ext.analysis.analyser.run", lambda *args: list(counted(*args)))
    monkeypatch.setattr("sglang_ext.analysis.analyser.pieces", counted)
    runner = runner_of(8, 1)
    runner.token_to_kv_pool.head_num, runner.token_to_kv_pool.dtype = KV_HEADS, torch.float32
    texts = Texts([drawn(37, 1), drawn(90, 2)], torch.zeros(VOCABULARY, dtype=torch.bool))
    Analyser(runner, lambda: texts, Cut(), [(0, 1)], rotation=ROTATION).analyse(drawn(20, 3))
    assert computed == [37, 20 + 20]


def test_parts_of_documents_are_prefilled_behind_the_prefix_and_what_precedes_them() -> None:
    runner = runner_of(8, 5)
    runner.token_to_kv_pool.head_num, runner.token_to_kv_pool.dtype = KV_HEADS, torch.float32
    texts = Texts([drawn(20, 1), drawn(20, 2)], torch.zeros(VOCABULARY, dtype=torch.bool))
    prefix, documents = drawn(33, 6), [drawn(41, 7), drawn(13, 8)]
    analyser = Analyser(runner, lambda: texts, Cut(), [(0, 1)], rotation=ROTATION, prefix=prefix)
    whole = [behind_text(runner, prefix, ids) for ids in documents]

    def before(number: int, start: int) -> Any:
        return lambda layer: tuple(part[:start].float() for part in whole[number][layer][1:])

    parts = [
        DocumentPart(documents[0][17:29], 17, before(0, 17)),
        DocumentPart(documents[1], 0, before(1, 0)),
    ]
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    analyser.prefill(parts, lambda layer, k, v: kept.append((k.clone(), v.clone())))
    for layer, (k, v) in enumerate(kept):
        (_, k0, v0), (_, k1, v1) = whole[0][layer], whole[1][layer]
        torch.testing.assert_close(k.double(), torch.cat((k0[17:29], k1)), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(v.double(), torch.cat((v0[17:29], v1)), rtol=1e-4, atol=1e-4)
    assert len(kept) == LAYERS


def test_critical_layers_are_those_whose_heads_find_most() -> None:
    score = torch.tensor([[0.75, 0.0], [0.5, 0.5], [0.25, 0.0], [0.5, 0.75], [0.5, 0.25]])
    assert best_layers(score) == (0, 1, 3), "of equal ones the first"
    assert best_layers(score[:2]) == (0, 1)
