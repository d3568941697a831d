"""SamKV's selection against the paper's equations written out token by token, and the rules for what is
recomputed.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.analysis.document_analysis import Analysis, Cut, SummaryError, quantize
from sglang_ext.context.recompute.row_attention import fused
from sglang_ext.context.selection import recompute_rules as rules
from sglang_ext.context.selection.blocks import Blocks
from sglang_ext.context.selection.queries import personalised
from sglang_ext.context.selection.recompute_rules import Kept, Rule
from sglang_ext.context.selection.samkv import choose
from sglang_ext.tensors.rope import Rotation
from sglang_ext.wire.protocol import ContextPlan, Span
from sglang_ext.wire.request_options import SamKvExperiment, SamKvOptions
from tests.analyses import local_queries, mean_keys

LAYERS, HEADS, KV_HEADS, DIM, SYSTEM = 3, 4, 2, 8, 5
ROTATION = Rotation(1.0 / 100 ** (torch.arange(0, DIM, 2) / DIM), DIM, neox=True)


def analysis_of(n: int, block: int, generator: torch.Generator) -> Analysis:
    blocks = -(-n // block)
    mean_k, mean_k_scale = quantize(torch.randn(LAYERS, blocks, KV_HEADS, DIM, generator=generator))
    local_q, local_q_scale = quantize(torch.randn(LAYERS, HEADS, DIM, generator=generator))
    token_k, token_k_scale = quantize(torch.randn(n, 2, DIM, generator=generator))
    return Analysis(
        n,
        block,
        2,
        mean_k,
        mean_k_scale,
        local_q,
        local_q_scale,
        token=torch.zeros(LAYERS, blocks, dtype=torch.uint8),
        attention=torch.rand(LAYERS, blocks, generator=generator),
        exponent=torch.rand(LAYERS, blocks, generator=generator).half(),
        sensitivity=torch.rand(n, generator=generator),
        begins=(torch.arange(n) % 7 == 0).to(torch.uint8),
        heads=torch.tensor([[0, 1], [2, 0]], dtype=torch.uint8),
        token_k=token_k,
        token_k_scale=token_k_scale,
    )


def plan_of(sizes: list[int]) -> ContextPlan:
    bounds = [0, SYSTEM]
    for size in sizes:
        bounds.append(bounds[-1] + size)
    return ContextPlan("compose", "n", "samkv", tuple(Span(a, b) for a, b in pairwise(bounds)))


def turned(vector: torch.Tensor, shift: int) -> torch.Tensor:
    """A [heads, DIM] vector moved by ``shift`` positions, written as complex numbers."""
    a, b = vector.double().chunk(2, -1)
    angle = shift * ROTATION.frequencies
    out = torch.complex(a, b) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((out.real, out.imag), -1)


def reference(
    plan: ContextPlan,
    analyses: list[Analysis],
    query: torch.Tensor,
    options: SamKvOptions,
    stable: list[int],
    prior: list[float] | None = None,
) -> list[list[int]]:
    """Kept document tokens per layer, the paper's way: one layer, one document, one block at a time."""
    spans = plan.spans[1:]
    count = len(spans)
    keys = [mean_keys(a).double() for a in analyses]
    local = [
        [turned(local_queries(a)[n], s.start) for a, s in zip(analyses, spans, strict=True)]
        for n in range(LAYERS)
    ]
    middle = [range(options.initial_blocks, a.blocks - a.local_blocks) for a in analyses]

    def query_for(n: int, i: int) -> torch.Tensor:
        q = query[n].double()
        if not options.personalised or count == 1:
            return q
        total = torch.zeros_like(q)
        for j in range(count):
            if j != i:
                cos = (q * local[n][j]).sum() / (q.norm() * local[n][j].norm())
                total += cos.abs() * local[n][j]
        return q + total / (count - 1)

    def score(n: int, i: int, b: int) -> float:
        q, k = query_for(n, i), turned(keys[i][n, b], spans[i].start)
        return float(sum((q[h] * k[h * KV_HEADS // HEADS]).sum() for h in range(HEADS))) / math.sqrt(DIM)

    scores = [
        [[score(n, i, b) for b in range(analyses[i].blocks)] for i in range(count)] for n in range(LAYERS)
    ]

    def length(i: int, b: int) -> int:
        return min(analyses[i].block, analyses[i].n_tokens - b * analyses[i].block)

    proportion = []
    for i in range(count):
        parts = []
        for n in stable:
            ends = [b for b in range(analyses[i].blocks) if b not in middle[i]]
            if not middle[i]:
                parts.append(0.0)
                continue
            anchor = sum(scores[n][i][b] * length(i, b) for b in ends) / sum(length(i, b) for b in ends)
            largest = scores[n][i][min(middle[i], key=lambda b: float(analyses[i].exponent[n, b]))]
            least = scores[n][i][min(middle[i], key=lambda b: float(analyses[i].attention[n, b]))]
            parts.append((largest - anchor) / (largest - least) if least < anchor <= largest else 0.0)
        proportion.append(sum(parts) / len(parts) * (prior[i] if prior else 1.0))
    total = sum(a.n_tokens for a in analyses)
    fixed = [
        spans[i].start + t
        for i in range(count)
        for t in range(analyses[i].n_tokens)
        if t // analyses[i].block not in middle[i]
    ]
    kept = []
    for n in range(LAYERS):
        pool = []
        for i in range(count):
            ranked = sorted(middle[i], key=lambda b: -scores[n][i][b])
            values = torch.tensor([scores[n][i][b] for b in middle[i]], dtype=torch.float64)
            mean, deviation = 0.0, 1.0
            if options.scoring == "zscore" and len(values):
                mean, deviation = float(values.mean()), float(values.var(correction=0).sqrt())
            number = len(ranked) if options.keep is not None else round(proportion[i] * len(ranked))
            shift = math.log(prior[i]) if prior else 0.0
            pool += [((scores[n][i][b] - mean) / deviation + shift, i, b) for b in ranked[:number]]
        budget = total // count if options.keep is None else max(0, round(options.keep * total) - len(fixed))
        tokens: list[int] = []
        for _, i, b in sorted(pool, reverse=True):
            start = spans[i].start + b * analyses[i].block
            tokens += list(range(start, start + min(length(i, b), budget - len(tokens))))
        kept.append(sorted(fixed + tokens))
    return kept


@given(
    st.lists(st.integers(3, 70), min_size=1, max_size=5),
    st.integers(0, 10_000),
    st.booleans(),
    st.sampled_from([None, 0.5, 0.8]),
    st.sampled_from([0, 1, 2]),
    st.sampled_from(["raw", "zscore"]),
    st.booleans(),
)
def test_selection_equals_the_equations(
    sizes: list[int],
    seed: int,
    bias: bool,
    keep: float | None,
    initial: int,
    scoring: Literal["raw", "zscore"],
    scored: bool,
) -> None:
    if scoring == "zscore":  # one or two blocks have the same scores in every document
        sizes = [size + 60 for size in sizes]
    generator = torch.Generator().manual_seed(seed)
    plan = plan_of(sizes)
    blocks = [4 if n < 40 else 8 for n in sizes]
    analyses = [analysis_of(n, block, generator) for n, block in zip(sizes, blocks, strict=True)]
    query = torch.randn(LAYERS, HEADS, DIM, generator=generator)
    options = SamKvOptions(
        initial_blocks=initial,
        personalised=bias,
        keep=keep,
        selection="layers",
        experimental=SamKvExperiment(scoring=scoring),
    )
    tables = Blocks.build(plan.spans[1:], blocks, initial=initial, local=2)
    prior = torch.rand(len(sizes), generator=generator) * 0.9 + 0.1 if scored else None
    chosen = choose(
        options, tables, analyses, query, plan.question_start, ROTATION, stable=[1, 2], prior=prior
    )
    wanted = reference(plan, analyses, query, options, [1, 2], None if prior is None else prior.tolist())
    rows = chosen.kept.tolist() if chosen.kept.dim() == 2 else [chosen.kept.tolist()] * LAYERS
    assert rows == wanted


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_a_passage_that_is_nearer_the_question_comes_first(power: float) -> None:
    """Three equal documents, of which the first one's passage is nearest."""
    from sglang_ext.context.selection.signals.document import document_prior
    from sglang_ext.wire.protocol import RetrievalScores

    generator = torch.Generator().manual_seed(1)
    one = analysis_of(40, 4, generator)
    plan = plan_of([40] * 3)
    tables = Blocks.build(plan.spans[1:], [4] * 3, initial=0, local=1)
    options = SamKvOptions(selection="shared", personalised=False, keep=0.4, experimental=SamKvExperiment())
    query = torch.randn(LAYERS, HEADS, DIM, generator=generator) * 0.1
    prior = document_prior(RetrievalScores((0.9, 0.1, 0.0), ((), (), ())), power)
    found = choose(
        options, tables, [one] * 3, query, plan.question_start, ROTATION, stable=[1], prior=prior
    ).kept
    inside = [int(((found >= s.start) & (found < s.end - 4)).sum()) for s in plan.spans[1:]]
    assert (prior is None) == (power == 0.0)
    if power:
        assert inside[0] == max(inside) == 36
    else:
        assert inside[0] < 36
    assert document_prior(None, 1.0) is None


def test_one_document_has_no_bias() -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(LAYERS, HEADS, DIM, generator=generator)
    found = personalised(
        query, [analysis_of(20, 4, generator)], torch.tensor([5]), ROTATION, lambda part: part
    )
    assert torch.equal(found[:, 0], query)


@given(
    st.lists(st.integers(1, 90), min_size=1, max_size=6),
    st.integers(0, 2),
    st.integers(1, 3),
    st.sampled_from([4, 8, 16]),
)
def test_blocks_cover_documents_once(sizes: list[int], initial: int, local: int, block: int) -> None:
    plan = plan_of(sizes)
    tables = Blocks.build(plan.spans[1:], [block] * len(sizes), initial=initial, local=local)
    fixed = set(tables.fixed().tolist())
    for span in plan.spans[1:]:
        blocks = -(-(span.end - span.start) // block)
        for t in range(span.start, span.end):
            b = (t - span.start) // block
            assert (t in fixed) == (b < initial or b >= blocks - local)
    assert tables.middle_tokens + len(fixed) == tables.tokens == sum(sizes)


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=4),
    st.integers(0, 10_000),
    st.floats(0.01, 1.0),
    st.booleans(),
    st.sampled_from(["sensitivity", "question"]),
)
def test_sensitivity_and_question_take_the_highest_of_what_is_kept(
    sizes: list[int], seed: int, share: float, by_layer: bool, rule: str
) -> None:
    generator = torch.Generator().manual_seed(seed)
    plan = plan_of(sizes)
    analyses = [analysis_of(n, 8, generator) for n in sizes]
    n = sum(sizes)
    count = max(1, n // 2)
    rows = [
        SYSTEM + torch.randperm(n, generator=generator)[:count].sort().values
        for _ in range(LAYERS if by_layer else 1)
    ]
    kept = torch.stack([torch.cat((torch.arange(SYSTEM), row)) for row in rows])
    attention = torch.rand(n, generator=generator)
    found = rules.choose(
        Kept(plan, kept if by_layer else kept[0], analyses, attention=attention), Rule(rule, share)
    ).tolist()
    score = attention if rule == "question" else torch.cat([a.sensitivity for a in analyses])
    layers = [sum(SYSTEM + t in row for row in (r.tolist() for r in rows)) / len(rows) for t in range(n)]
    ranked = sorted((t for t in range(n) if layers[t]), key=lambda t: -float(score[t]) * layers[t])
    expected = min(count, max(1, round(share * count)))
    assert found == sorted(SYSTEM + t for t in ranked[:expected])


def test_outliers_are_initial_local_and_flagged_tokens_that_are_kept() -> None:
    generator = torch.Generator().manual_seed(3)
    analysis = analysis_of(160, 8, generator)
    analysis.exponent[:] = 1.0
    analysis.exponent[2, 7] = -9.0  # more than three sigma below the other 19
    analysis.token[2, 7] = 5
    assert analysis.outliers().nonzero().tolist() == [[2, 61]]
    plan = plan_of([160])
    whole = torch.arange(SYSTEM + 160)
    ends = [SYSTEM + t for t in (*range(8), *range(144, 160))]
    assert rules.choose(Kept(plan, whole, [analysis]), Rule("outliers")).tolist() == sorted(
        [*ends, SYSTEM + 61]
    )
    without = (
        torch.stack([whole, whole, torch.cat((whole[:66], whole[67:], whole[:1]))]).sort(1).values
    )  # layer 2 keeps it not
    assert SYSTEM + 61 not in rules.choose(Kept(plan, without, [analysis]), Rule("outliers")).tolist()


def test_an_analysis_survives_its_bytes_and_no_others_do() -> None:
    analysis = analysis_of(45, 8, torch.Generator().manual_seed(1))
    data = analysis.encode()
    again = Analysis.decode(data, 45)
    assert all(
        torch.equal(a, b)
        for a, b in zip(analysis._tensors().values(), again._tensors().values(), strict=True)
    )
    for bad in (data[:-1], data + b"\0", b"", b"{}\n", data[10:]):
        with pytest.raises(SummaryError):
            Analysis.decode(bad, 45)
    with pytest.raises(SummaryError, match="another document"):
        Analysis.decode(data, 44)


@pytest.mark.parametrize(
    ("layers", "heads", "kv_heads", "dim", "itemsize"),
    [(32, 32, 8, 128, 2), (10, 6, 2, 64, 4), (28, 28, 4, 128, 2)],
)
@pytest.mark.parametrize("n", [256, 512, 4096])
def test_summaries_take_at_most_three_percent(
    layers: int, heads: int, kv_heads: int, dim: int, itemsize: int, n: int
) -> None:
    block = Cut().size(n, itemsize)
    blocks = -(-n // block)
    per_head = layers * (dim + 2)
    size = blocks * (kv_heads * per_head + layers * (1 + 4 + 2)) + heads * per_head + 5 * n
    assert size <= 0.03 * n * layers * kv_heads * dim * 2 * itemsize


def test_fusion_blends_by_likeness() -> None:
    old, new = torch.randn(4, 2, 8), torch.randn(4, 2, 8)
    theta = torch.nn.functional.cosine_similarity(new, old, dim=-1)[..., None]
    assert torch.allclose(fused(new, old), theta * new + (1 - theta) * old, atol=1e-6)
    assert torch.allclose(fused(old, old), old, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"block_size": 12}, "power of two"),
        ({"selection": "some"}, "selection .* must be 'sentences', 'shared', 'layers' or 'none'"),
        ({"update": "mix"}, "option update .* must be"),
        ({"personalised": 1}, "valid boolean"),
        ({"recompute": "best"}, "option recompute .* must be"),
        ({"block_size": 2}, "power of two from 4 to 64"),
        ({"local_blocks": 0}, "greater than or equal to 1"),
        ({"local_blocks": 5}, "less than or equal to 4"),
        ({"keep": 0}, "option keep .* must be"),
        ({"experimental": {"lexical_weight": 1.5}}, "experimental.lexical_weight .* less than or equal to 1"),
        ({"experimental": {"title_weight": -1}}, "experimental.title_weight .* greater than or equal to 0"),
        ({"experimental": {"attention_power": 2}}, "experimental.attention_power .* less than or equal to 1"),
        ({"experimental": {"length_penalty": "long"}}, "experimental.length_penalty .* valid number"),
        ({"min_tokens": -1}, "min_tokens .* greater than or equal to 0"),
        ({"kept_positions": "compact", "selection": "layers"}, "same tokens in every layer"),
        ({"experimental": {"scoring": "raw"}}, "scoring .* must be one of keys, attention"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], says: str) -> None:
    from sglang_ext.context.selection.strategies import ModelShape, partial_selection
    from sglang_ext.wire.protocol import PlanError

    plan = plan_of([40, 60])
    with pytest.raises(PlanError, match=says):
        partial_selection(
            ContextPlan(plan.operation, plan.namespace, "samkv", plan.spans, options), ModelShape(LAYERS)
        )


@given(st.lists(st.integers(3, 70), min_size=1, max_size=4), st.integers(0, 10_000))
def test_attention_scoring_is_the_largest_head_of_a_softmax_over_mean_keys(
    sizes: list[int], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    plan = plan_of(sizes)
    analyses = [analysis_of(n, 8, generator) for n in sizes]
    query = torch.randn(LAYERS, HEADS, DIM, generator=generator)
    tables = Blocks.build(plan.spans[1:], [8] * len(sizes), initial=1, local=2)
    options = SamKvOptions(personalised=False, selection="layers", keep=0.6)
    chosen = choose(options, tables, analyses, query, plan.question_start, ROTATION)
    rows = chosen.kept.tolist() if chosen.kept.dim() == 2 else [chosen.kept.tolist()] * LAYERS
    fixed = tables.fixed().tolist()
    budget = max(0, min(tables.middle_tokens, round(0.6 * sum(sizes)) - len(fixed)))
    for n in range(LAYERS):
        found = []
        for h in range(HEADS):
            logits, names = [], []
            for span, analysis in zip(plan.spans[1:], analyses, strict=True):
                for b in range(analysis.blocks):
                    key = turned(mean_keys(analysis)[n, b], span.start)[h * KV_HEADS // HEADS]
                    size = min(8, analysis.n_tokens - 8 * b)
                    logits.append(float(query[n, h].double() @ key) / math.sqrt(DIM) + math.log(size))
                    names.append((span.start + 8 * b, size, 1 <= b < analysis.blocks - 2))
            found.append(torch.tensor(logits).softmax(0))
        best = torch.stack(found).amax(0)
        tokens: list[int] = []
        for place in best.argsort(descending=True).tolist():
            start, size, middle = names[place]
            if middle:
                tokens += list(range(start, start + min(size, budget - len(tokens))))
        assert rows[n] == sorted(fixed + tokens)
