"""Training: it lowers held-out KL, survives a kill, and never takes a step with a broken gradient."""

from __future__ import annotations

import itertools
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ragserve.adapt import distillation, greedy, training
from ragserve.adapt.checkpoints import Checkpoints, TrainingCourse
from ragserve.adapt.low_rank import AdaptedModel
from ragserve.adapt.sample_mix import SampleMix
from ragserve.adapt.training import Training, TrainingOptions
from ragserve.answering.prompt import PromptBuilder
from ragserve.errors import RagserveError
from tests.integration.forked_starts import run_module
from tests.unit.adapt.tiny_models import load, longer, make_model, rows

OPTIONS = TrainingOptions(seconds=1e9, steps=8, batch=4, every=2, rate=3e-2, answer_tokens=3)
KILLED_AT = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def make(folder: Path, work: Path, options: TrainingOptions = OPTIONS, **more: Any) -> Training:
    """A training of the tiny model with its checkpoints in ``work``."""
    model = load(folder)
    builder = PromptBuilder(model.tokenizer)
    given = rows(12)
    mix = SampleMix(given[:9], builder, k=3, room=400, seed=0)
    prompts = [
        mix.sequence(row.question, mix.context(row, n), composed=True) for n, row in enumerate(given[9:])
    ]
    model.add_adapter(4, 0)
    return Training(model, mix, prompts, Checkpoints(work), options, **more)


def adapter(run: Training) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in run._model.parameters().items()}


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Training, Path]:
    """A training that ran to its end, and its folder."""
    work = tmp_path_factory.mktemp("whole")
    run = make(folder, work)
    run.run()
    return run, work


def test_held_out_kl_falls_and_the_best_adapter_is_kept(whole: tuple[Training, Path]) -> None:
    run, work = whole
    course = run.course
    kl = {each["step"]: each["composed"] + each["whole"] for each in course.history}
    assert list(kl) == [0, 2, 4, 6, 8]
    assert course.best_step == min(kl, key=lambda step: kl[step]) > 0
    composed = {each["step"]: each["composed"] for each in course.history}
    assert composed[course.best_step] < 0.8 * composed[0]
    assert course.history[0]["whole"] < 1e-3, "an adapter changes nothing before it is trained"
    best = load_file(work / f"best-{course.best_step}.safetensors")
    for name, value in adapter(run).items():
        assert torch.equal(value, best[name])


def test_a_run_that_was_killed_takes_the_same_steps(
    whole: tuple[Training, Path], folder: Path, tmp_path: Path
) -> None:
    """A process of its own is killed after step 5; steps from the checkpoint at 4 on are taken again."""
    done = run_module("tests.unit.adapt.killed_training", str(folder), str(tmp_path), timeout=800)
    assert done.returncode == -signal.SIGKILL
    taken: list[int] = []
    again = make(folder, tmp_path, on_step=taken.append)
    again.run()
    assert taken == [5, 6, 7, 8]
    for each, other in zip(again.course.history, whole[0].course.history, strict=True):
        assert each == pytest.approx(other, rel=1e-3)
    for name, value in adapter(whole[0]).items():
        torch.testing.assert_close(adapter(again)[name], value, rtol=1e-4, atol=1e-6)


def test_a_best_adapter_stays_until_a_checkpoint_names_another(folder: Path, tmp_path: Path) -> None:
    run = make(folder, tmp_path)
    checkpoints, course = Checkpoints(tmp_path), TrainingCourse(step=2, best_step=2)
    checkpoints.save_best({"a": torch.ones(1)}, 2)
    checkpoints.save(course, run._model.parameters(), {})
    checkpoints.save_best({"a": torch.zeros(1)}, 4)  # killed before the checkpoint that names it
    known = checkpoints.load()
    assert known is not None
    assert checkpoints.best(known[0].best_step)["a"] == 1
    (tmp_path / "best-of.txt").write_text("")
    checkpoints.save(replace(course, step=4, best_step=4), run._model.parameters(), {})
    assert {path.name for path in tmp_path.glob("best*")} == {"best-4.safetensors", "best-of.txt"}


def test_tensors_are_on_disk_before_latest_names_them(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        order.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name.partition(".")[0])
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    Checkpoints(tmp_path).save(TrainingCourse(step=2), {"a": torch.ones(1)}, {})
    assert order[:4] == ["adapter", "optimiser", "checkpoint-2", "latest"]


def test_time_may_end_among_the_answers_of_a_block(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """40 steps' prompts are answered before the first one is taken, in several batches."""
    monkeypatch.setattr(greedy, "_MOST", 64)
    times = itertools.count(step=10.0)
    options = TrainingOptions(**{**vars_of(OPTIONS), "seconds": 15.0, "steps": None, "every": 40})
    run = make(folder, tmp_path, options, clock=lambda: next(times))
    with pytest.raises(RagserveError, match=r"never fell in 0 steps.*more time"):
        run.run()
    known = Checkpoints(tmp_path).load()
    assert known is not None
    assert known[0].seconds >= 15


def test_batches_of_answers_are_bound_by_room(folder: Path) -> None:
    assert load(folder).kv_bytes == 2 * 2 * 2 * 8 * 4
    assert [len(each) for each in greedy._batches(100, [(1, 20)] * 12)] == [5, 5, 2]
    assert [len(each) for each in greedy._batches(100, [(1, 400)] * 2)] == [1, 1]
    assert [len(each) for each in greedy._batches(100, [(2, 20)] * 5)] == [2, 2, 1]


def test_a_checkpoint_without_its_optimiser_goes_on_with_a_new_one(folder: Path, tmp_path: Path) -> None:
    make(folder, tmp_path, TrainingOptions(**{**vars_of(OPTIONS), "steps": 2})).run()
    [optimiser] = tmp_path.glob("checkpoint-2/optimiser.pt")
    optimiser.unlink()
    run = make(folder, tmp_path)
    run.run()
    assert [each["step"] for each in run.course.history] == [0, 2, 4, 6, 8]


def vars_of(options: TrainingOptions) -> dict[str, Any]:
    return {name: getattr(options, name) for name in options.__dataclass_fields__}


def test_a_step_without_a_finite_gradient_is_skipped(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = itertools.count()

    def broken(model: AdaptedModel, sequences: Any) -> torch.Tensor:
        found = distillation.divergence(model, sequences)
        return found * float("nan") if torch.is_grad_enabled() and next(calls) == 1 else found

    monkeypatch.setattr(training, "divergence", broken)
    run = make(folder, tmp_path)
    course = run.run()
    assert course.skipped == 1
    assert all(torch.isfinite(value).all() for value in adapter(run).values())


def test_layers_are_computed_again_once_the_memory_is_full(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step is taken all the same, and so are those after it."""
    run = make(folder, tmp_path)
    run._model.causal.gradient_checkpointing_disable()
    full = iter([False, True])

    def divergence(model: AdaptedModel, sequences: Any) -> torch.Tensor:
        if torch.is_grad_enabled() and next(full, False):
            raise torch.OutOfMemoryError
        return distillation.divergence(model, sequences)

    monkeypatch.setattr(training, "divergence", divergence)
    course = run.run()
    assert course.step == 8
    assert course.skipped == 0
    assert run._model.causal.is_gradient_checkpointing


def test_memory_that_stays_full_ends_a_training(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(model: AdaptedModel, sequences: Any) -> torch.Tensor:
        if torch.is_grad_enabled():
            raise torch.OutOfMemoryError
        return distillation.divergence(model, sequences)

    monkeypatch.setattr(training, "divergence", full)
    with pytest.raises(torch.OutOfMemoryError):
        make(folder, tmp_path).run()


def test_a_training_that_stays_broken_ends(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(model: AdaptedModel, sequences: Any) -> torch.Tensor:
        found = distillation.divergence(model, sequences)
        return found * float("inf") if torch.is_grad_enabled() else found

    monkeypatch.setattr(training, "divergence", broken)
    run = make(folder, tmp_path, TrainingOptions(**{**vars_of(OPTIONS), "steps": 60}))
    with pytest.raises(RagserveError, match="had no finite gradient"):
        run.run()
    assert run.course.step == 5


def test_samples_are_the_same_for_a_seed(folder: Path) -> None:
    builder = PromptBuilder(load(folder).tokenizer)
    one, same, other = (SampleMix(rows(12), builder, k=3, room=400, seed=seed) for seed in (0, 0, 1))
    drawn = [[mix.sample(number) for number in range(40)] for mix in (one, same, other)]
    assert drawn[0] == drawn[1] != drawn[2]
    composed = [each for each in drawn[0] if each.composed]
    assert {len(each.documents) for each in composed} == {1, 2, 3}
    assert any(each.rows for each in drawn[0]), "plain text"
    assert any(each.documents and not each.composed for each in drawn[0]), "whole prompts"


def test_a_prompt_asks_what_else_its_passages_answer(folder: Path) -> None:
    """Questions about all passages, each laid out as if it were asked alone, as many as fit."""
    builder = PromptBuilder(load(folder).tokenizer)
    given = rows(12, passages=3)
    texts = [row.passages[0] for row in given]
    shared = [
        row.model_copy(update={"passages": (texts[n], texts[n - 1], texts[n - 2])})
        for n, row in enumerate(given)
    ]
    two = shared[0].model_copy(update={"question": "What of both?", "gold": (0, 1)})
    mix = SampleMix([*shared, two], builder, k=3, room=400, seed=0, answer_tokens=5)
    drawn = [each for number in range(200) if not (each := mix.sample(number)).rows]
    questions = {row.question: row for row in (*shared, two)}
    asked = 0
    for each in drawn:
        texts_of = {builder.words(ids) for ids in each.documents}
        assert len(each.tails) == len({*map(tuple, each.tails)}) <= 8
        assert each.context + sum(len(tail) + 5 for tail in each.tails) <= 400 + 5
        for tail in each.tails[1:]:
            asked += 1
            [row] = [row for question, row in questions.items() if question in builder.words(tail)]
            assert all(any(text in shown for shown in texts_of) for text in row.gold_texts)
    assert asked > len(drawn) / 2
    assert any(questions_of.more and not questions_of.composed for questions_of in drawn)
    small = SampleMix([*shared, two], builder, k=3, room=max(map(len, drawn)) // 2, seed=0, answer_tokens=5)
    assert all(len(small.sample(number)) <= max(map(len, drawn)) // 2 for number in range(40))


def test_the_passage_that_answers_is_there_where_not_all_fit(folder: Path) -> None:
    """In every prompt but those that are to lack it, in any place, as long as it is before others."""
    builder = PromptBuilder(load(folder).tokenizer)
    given = [longer(row, 120) for row in rows(12, passages=5)]
    mix = SampleMix(given, builder, k=5, room=400, seed=0)
    places = set()
    for n, row in enumerate(given):
        context = mix.context(row, n)
        assert 1 < len(context) < 5
        prompt = mix.sequence(row.question, context)
        assert len(prompt) <= 400
        assert len(prompt.documents) == len(context)
        places.add(context.index(row.passages[0]))
        assert row.passages[0] not in mix.context(row, n, without_gold=True)
    assert len(places) > 1
    gold = [builder.document_ids(row.passages[0].title, row.passages[0].text) for row in given]
    drawn = [each for number in range(200) if not (each := mix.sample(number)).rows]
    shown = sum(any(ids in gold for ids in each.documents) for each in drawn)
    assert shown > 0.8 * len(drawn)


def test_what_is_not_finite_is_named_before_the_first_step(folder: Path, tmp_path: Path) -> None:
    run = make(folder, tmp_path / "work")
    layer = run._model.causal.model.layers[1]
    layer.post_attention_layernorm.register_forward_hook(lambda module, inputs, output: output / 0.0)
    with pytest.raises(RagserveError, match=r"\.1\.post_attention_layernorm gives .* inputs are finite"):
        run.run()
    assert run.course.step == 0
