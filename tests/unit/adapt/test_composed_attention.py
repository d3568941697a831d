"""Packed sequences are computed as the engine composes them: against passes one after another."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache

from ragserve.adapt import greedy
from ragserve.adapt.composed_attention import DecodeAttention, PackedAttention, attend_packed
from ragserve.adapt.distillation import divergence
from ragserve.adapt.low_rank import AdaptedModel
from ragserve.adapt.packing import TrainingSequence, packed
from tests.unit.adapt.tiny_models import load, make_model, tokens

FAMILIES = ("llama", "qwen2", "qwen3")


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AdaptedModel:
    return load(make_model(tmp_path_factory.mktemp(request.param), request.param))


def sequence(sizes: tuple[int, ...], *, composed: bool, seed: int = 0) -> TrainingSequence:
    """Head, documents, question and answer of these sizes."""
    head, *documents, question, answer = (tokens(size, 100 * seed + n) for n, size in enumerate(sizes))
    return TrainingSequence(head, documents, question, answer, composed=composed)


def extended(model: AdaptedModel, ids: list[int], start: int, past: list | None = None) -> tuple:
    """Logits of ``ids`` from position ``start`` on behind ``past``, and K and V of all."""
    cache = DynamicCache()
    for layer, (k, v) in enumerate(past or []):
        cache.update(k, v, layer)
    places = torch.arange(start, start + len(ids))[None]
    model.causal.set_attn_implementation("sdpa")
    try:
        with torch.no_grad():
            out = model.causal(
                torch.tensor([ids]), position_ids=places, past_key_values=cache, use_cache=True
            )
    finally:
        attend_packed(model.causal)
    return out.logits[0], [(layer.keys, layer.values) for layer in out.past_key_values.layers]


def turned(model: AdaptedModel, k: torch.Tensor, by: int) -> torch.Tensor:
    cos, sin = model.causal.model.rotary_emb(k, torch.tensor([[by]]))
    half = k.shape[-1] // 2
    return k * cos + torch.cat((-k[..., half:], k[..., :half]), -1) * sin


def composed_logits(model: AdaptedModel, one: TrainingSequence) -> torch.Tensor:
    """What the engine does with nothing recomputed: each document behind the prefix, which is dropped, its
    keys turned to its place; then question and answer behind them all."""
    before = len(model.prefix)
    _, prefix = extended(model, model.prefix, 0) if before else (None, [])
    _, past = extended(model, list(one.head), 0)
    place = len(one.head)
    for document in one.documents:
        _, own = extended(model, list(document), before, prefix)
        own = [(turned(model, k[:, :, before:], place - before), v[:, :, before:]) for k, v in own]
        past = [
            tuple(torch.cat(pair, 2) for pair in zip(*layers, strict=True))
            for layers in zip(past, own, strict=True)
        ]
        place += len(document)
    logits, _ = extended(model, [*one.question, *one.answer[:-1]], place, past)
    return logits[len(one.question) - 1 :]


def target_logits(model: AdaptedModel, sequences: list[TrainingSequence]) -> list[torch.Tensor]:
    pack = model.pack(sequences)
    with torch.no_grad():
        hidden, *_ = model.run(pack)
        found = model.logits(hidden[pack.targets])
    return list(found.split([len(each.targets) for each in sequences]))


SIZES = [(9, 17, 1, 31, 6, 3), (1, 40, 5, 1), (13, 7, 2)]


@pytest.mark.parametrize("prefix", [0, 1, 24])
def test_composed_prompts_are_computed_as_documents_that_were_prefilled_apart(
    model: AdaptedModel, prefix: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "prefix", tokens(prefix, 7))
    sequences = [sequence(sizes, composed=True, seed=n) for n, sizes in enumerate(SIZES)]
    for one, found in zip(sequences, target_logits(model, sequences), strict=True):
        torch.testing.assert_close(found, composed_logits(model, one), atol=2e-4, rtol=2e-4)


def test_whole_prompts_in_a_pack_are_computed_as_they_are_alone(model: AdaptedModel) -> None:
    """Beside composed ones, and neither sees the other."""
    whole = [sequence(sizes, composed=False, seed=n) for n, sizes in enumerate(SIZES)]
    beside = [whole[0], sequence(SIZES[1], composed=True, seed=5), whole[1], whole[2]]
    found = target_logits(model, beside)
    for one, logits in zip(whole, (found[0], *found[2:]), strict=True):
        ids = [*one.head, *(t for d in one.documents for t in d), *one.question, *one.answer[:-1]]
        expected, _ = extended(model, ids, 0)
        torch.testing.assert_close(logits, expected[-len(one.answer) :], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("composed", [True, False])
def test_questions_over_the_same_documents_do_not_see_each_other(
    model: AdaptedModel, *, composed: bool
) -> None:
    one, other, third = (
        sequence((9, 17, 31, 6, size), composed=composed, seed=n) for n, size in enumerate((3, 1, 4))
    )
    together = replace(one, more=[(other.question, other.answer), (third.question, third.answer)])
    beside = sequence(SIZES[0], composed=not composed, seed=5)
    logits, _ = target_logits(model, [together, beside])
    alone = [replace(one, question=q, answer=a) for q, a in ((one.question, one.answer), *together.more)]
    torch.testing.assert_close(logits, torch.cat(target_logits(model, alone)), atol=2e-4, rtol=2e-4)
    assert together.answers == [*one.answer, *other.answer, *third.answer]


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_sees_what_masks_see(model: AdaptedModel) -> None:
    sequences = [sequence(sizes, composed=n != 1, seed=n) for n, sizes in enumerate(SIZES)]
    sequences[0] = replace(sequences[0], more=[(tokens(5, 8), tokens(2, 9))])
    found = []
    for flex in (True, False):
        pack = packed(sequences, model.prefix)
        pack.pad(256)
        draw = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(1, heads, len(pack.ids), 8, generator=draw) for heads in (4, 2, 2))
        attention = PackedAttention(pack, model.causal.model.rotary_emb, torch.device("cpu"), flex=flex)
        found.append(attention(q, k, v, 8**-0.5))
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)


def test_masks_leave_cudnn_out(model: AdaptedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradients can be NaN where there is a mask."""
    allowed = []

    def attention(*given: Any, **options: Any) -> torch.Tensor:
        allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
        return scaled_dot_product_attention(*given, **options)

    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", attention)
    target_logits(model, [sequence(SIZES[0], composed=True)])
    assert allowed
    assert not any(allowed)


def test_greedy_answers_continue_each_prompt_as_it_would_alone(model: AdaptedModel) -> None:
    prompts = [sequence((*sizes[:-1], 0), composed=n != 1, seed=n) for n, sizes in enumerate(SIZES)]
    for one, found in zip(prompts, greedy.answers(model, prompts, 4), strict=True):
        for at, token in enumerate(found):
            known = TrainingSequence(one.head, one.documents, one.question, [*found[:at], 0], one.composed)
            [logits] = target_logits(model, [known])
            best = logits[-1]
            assert best[token] >= best.max() - 1e-3


def test_hidden_states_are_kept_for_training_alone(
    model: AdaptedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, seen, alive = AdaptedModel.logits, list[weakref.ref[torch.Tensor]](), list[int]()

    def noting(self: AdaptedModel, hidden: torch.Tensor) -> torch.Tensor:
        seen.append(weakref.ref(hidden))
        alive.append(sum(each() is not None for each in seen))
        return logits(self, hidden)

    monkeypatch.setattr(AdaptedModel, "logits", noting)
    monkeypatch.setattr(model, "ends", ())
    prompts = [sequence((9, 17, 6, 0), composed=True)]
    for answer, most in ((greedy.answers, 2), (greedy.taught, 6)):  # the prompt's and the step's
        seen.clear()
        alive.clear()
        answer(model, prompts, 6)
        assert max(alive) == most


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4), (3, 1)])
def test_a_decode_step_sees_what_is_not_padding(heads: int, kv_heads: int) -> None:
    rows, keys, size = 3, 11, 8
    q, k, v = (
        torch.randn(rows, count, n, size) for count, n in ((heads, 1), (kv_heads, keys), (kv_heads, keys))
    )
    seen = torch.arange(keys) >= torch.tensor([[0], [4], [10]])
    groups = heads // kv_heads
    wanted = scaled_dot_product_attention(
        q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), seen[:, None, None], scale=0.3
    )
    found = DecodeAttention(seen)(q, k, v, 0.3)
    torch.testing.assert_close(found, wanted.transpose(1, 2))


def test_the_base_answers_as_without_the_adapter(tmp_path: Path) -> None:
    model = load(make_model(tmp_path, "qwen2"))
    prompts = [sequence((9, 17, 6, 3), composed=True)]
    before = target_logits(model, prompts)
    model.add_adapter(4, 0)
    for value in model.parameters().values():
        torch.nn.init.normal_(value.data)
    changed = target_logits(model, prompts)
    with model.base():
        assert torch.equal(target_logits(model, prompts)[0], before[0])
    assert not torch.allclose(changed[0], before[0])
    assert torch.equal(target_logits(model, prompts)[0], changed[0])


def test_what_the_base_said_teaches_as_the_base_does(model: AdaptedModel) -> None:
    prompts = [sequence((9, 17, 31, 6, 1), composed=True), sequence((5, 40, 3, 1), composed=False, seed=1)]
    prompts = [replace(each, answer=()) for each in prompts]
    whole = [replace(each, composed=False) for each in prompts]
    answered = [
        replace(each, answer=ids, taught=states)
        for each, ([ids], states) in zip(prompts, greedy.taught(model, whole, 7), strict=True)
    ]
    assert [len(each.taught) for each in answered] == [len(each.answer) for each in answered]
    unknown = [replace(each, taught=None) for each in answered]
    with torch.no_grad():
        own, wanted = (divergence(model, each) for each in (answered, unknown))
        mixed = divergence(model, [answered[0], unknown[1]])
    assert wanted > 1e-4
    torch.testing.assert_close(own, wanted, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(mixed, wanted, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("room", [10**9, 150], ids=["together", "few at once"])
def test_questions_over_the_same_passages_are_answered_as_if_alone(
    model: AdaptedModel, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """In one pass over the passages, if their KV for all has room: answers, what predicts them, and their
    loss."""
    monkeypatch.setattr(greedy, "_CACHED_CPU", room * model.kv_bytes)
    several, alone = [], []
    for seed, composed in enumerate((True, False, True)):
        one = replace(sequence((9, 17, 31, 6, 1), composed=composed, seed=seed), answer=())
        questions = [[5 + seed, 7, 8], [9] * (4 + seed), *([[11, 12, 13, 14, 15]] if seed else [])]
        several.append(replace(one, more=[(question, ()) for question in questions]))
        alone.append([one, *(replace(one, question=question) for question in questions)])
    flat = [each for group in alone for each in group]
    found = greedy.taught(model, several, 5)
    wanted = iter(greedy.taught(model, flat, 5))
    for group, (answers, states) in zip(alone, found, strict=True):
        own = [next(wanted) for _ in group]
        torch.testing.assert_close(states, torch.cat([each for _, each in own]), atol=1e-4, rtol=1e-4)
        assert answers == [ids for [ids], _ in own]
    whole = greedy.taught(model, [replace(each, composed=False) for each in several], 5)
    parts = iter(greedy.taught(model, [replace(each, composed=False) for each in flat], 5))
    packed_, apart = [], []
    for one, group, ([first, *others], states) in zip(several, alone, whole, strict=True):
        more = [(question, ids) for (question, _), ids in zip(one.more, others, strict=True)]
        packed_.append(replace(one, answer=first, more=more, taught=states))
        apart += [
            replace(each, answer=ids, taught=own) for each, ([ids], own) in zip(group, parts, strict=False)
        ]
    with torch.no_grad():
        together, sum_ = divergence(model, packed_), divergence(model, apart)
    assert sum_ > 1e-4
    torch.testing.assert_close(together, sum_, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("saving", [True, False])
def test_an_adapter_of_32_bits_is_computed_in_the_models_16(tmp_path: Path, *, saving: bool) -> None:
    """Its gradients are those of a model of 32 bits, whether layers are computed again or not."""
    gradients = []
    for dtype in (torch.bfloat16, torch.float32):
        loaded = load(make_model(tmp_path / str(dtype), "qwen2"))
        loaded.causal.to(dtype)
        loaded.add_adapter(4, 0)
        if not saving:
            loaded.causal.gradient_checkpointing_disable()
        draw = torch.Generator().manual_seed(0)
        for value in loaded.parameters().values():
            assert value.dtype == torch.float32
            torch.nn.init.normal_(value.data, std=0.1, generator=draw)
        with loaded.training():
            divergence(loaded, [sequence((9, 17, 31, 6, 4), composed=True)]).backward()
        assert greedy.answers(loaded, [sequence((9, 17, 6, 1), composed=True)], 3)
        gradients.append(torch.cat([value.grad.flatten() for value in loaded.parameters().values()]))
    own, wanted = gradients
    assert torch.nn.functional.cosine_similarity(own, wanted, dim=0) > 0.97
