"""A run from questions to a model folder, its guards, and what it refuses."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from ragserve.adapt import adaptation, guards, model_folder, namespace_rows
from ragserve.adapt.adaptation import Adaptation, adapt
from ragserve.adapt.guards import Measured
from ragserve.adapt.training import TrainingOptions
from ragserve.commands import adapt as commands
from ragserve.config import Settings
from ragserve.errors import Conflict, RagserveError
from tests.unit.adapt.tiny_models import load, longer, make_model, rows, write

OPTIONS = TrainingOptions(seconds=1e9, steps=2, batch=2, every=1, rate=5e-3, answer_tokens=3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("base"))


@pytest.fixture
def job(model: Path, tmp_path: Path) -> Adaptation:
    data = write(tmp_path / "rows.jsonl", rows(60, passages=3))
    return Adaptation(
        model, tmp_path / "out", tmp_path / "work", OPTIONS, data=data, held_out=10, rank=4, room=512
    )


def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path / "data", top_k=2, kv_prefix="none")


def changed(job: Adaptation, **fields: Any) -> Adaptation:
    names = job.__dataclass_fields__
    return Adaptation(**{name: getattr(job, name) for name in names} | fields)


def test_the_folder_is_a_model_with_its_adapter_and_record(
    job: Adaptation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random weights say nothing: what the guards measure is not asked here."""
    monkeypatch.setattr(guards, "failures", lambda before, after: [])
    record = adapt(settings(tmp_path), job)
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    merged = AutoModelForCausalLM.from_pretrained(job.out)
    base = AutoModelForCausalLM.from_pretrained(job.model)
    assert AutoTokenizer.from_pretrained(job.out).chat_template
    ids = torch.arange(20, 60)[None]
    with torch.no_grad():
        own, before = merged(ids).logits, base(ids).logits
        adapted = PeftModel.from_pretrained(base, job.out / "adapter")(ids).logits
    torch.testing.assert_close(own, adapted, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(own, before, atol=1e-3)
    there = json.loads((job.out / "ragserve-adapt.json").read_text())
    assert there == record
    assert there["questions"] == 50
    assert there["after"]["questions"] == there["lost"]["whole_f1"]["n"] == there["kl_questions"] == 10
    assert there["lost"]["whole_f1"]["at_least"] <= there["lost"]["whole_f1"]["points"]
    assert there["kl_after"]["composed"] < there["kl_before"]["composed"]
    assert not (job.out / "ragserve-gate.json").exists(), "what was verified of the base is not of this model"
    assert not job.work.exists()
    assert {path.name for path in tmp_path.iterdir()} == {"out", "rows.jsonl"}


def test_a_guard_that_fails_writes_nothing(
    job: Adaptation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guards, "PERPLEXITY", 0.5)
    with pytest.raises(RagserveError, match=r"Nothing is written.*perplexity on [\d,]+ tokens"):
        adapt(settings(tmp_path), job)
    assert not job.out.exists()
    assert (job.work / "refused.json").exists()
    with pytest.raises(RagserveError, match="differs in rank"):
        adapt(settings(tmp_path), changed(job, rank=2))


def test_a_fifth_is_held_out_of_which_training_looks_at_100(
    job: Adaptation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guards, "failures", lambda before, after: [])
    data = write(tmp_path / "many.jsonl", rows(525, passages=1))
    options = TrainingOptions(seconds=1e9, steps=1, batch=2, every=1, rate=5e-3, answer_tokens=1)
    more = Adaptation(job.model, job.out, job.work, options, data=data, rank=4, room=512)
    record = adapt(settings(tmp_path), more)
    assert record["lost"]["whole_f1"]["n"] == record["after"]["unanswerable"] + 105 == 105
    assert record["kl_questions"] == 100
    assert record["questions"] == 420


def test_the_table_says_what_its_questions_can_show(
    job: Adaptation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guards, "failures", lambda before, after: [])
    app = typer.Typer()
    commands.register(app)
    app.command("other")(lambda: None)  # a Typer app with one command takes no command name
    options = {"data": job.data, "data-dir": tmp_path / "data", "top-k": 2, "kv-prefix": "none"}
    options |= {"steps": 1, "batch": 2, "every": 1, "rate": 5e-3, "answer-tokens": 2, "pack-tokens": 512}
    arguments = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    done = CliRunner().invoke(
        app, ["adapt", str(job.model), str(job.out), *arguments], catch_exceptions=False
    )
    assert done.exit_code == 0, done.output
    [row] = [line for line in done.stdout.splitlines() if "F1, whole prompts" in line]
    assert re.search(r"-?[\d.]+ \[-[\d.]+, [\d.]+\] │ +12 ", row)
    assert "the base refused nothing, as far as English words tell" in done.stdout
    assert re.search(r"so few questions .* whole prompts may lose \d\d points of F1", done.stdout)


@pytest.mark.parametrize("out", [".", "/"])
def test_an_out_without_a_name_is_there_already(job: Adaptation, out: str) -> None:
    app = typer.Typer()
    commands.register(app)
    app.command("other")(lambda: None)  # a Typer app with one command takes no command name
    with pytest.raises(Conflict, match="exists already"):
        CliRunner().invoke(
            app, ["adapt", str(job.model), out, "--data", str(job.data)], catch_exceptions=False
        )


def test_what_users_asked_is_readable_by_nobody_else(
    job: Adaptation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(namespace_rows, "make_rows", lambda *args: rows(60, passages=3))
    monkeypatch.setattr(guards, "PERPLEXITY", 0.5)
    before = os.umask(0o022)
    try:
        with pytest.raises(RagserveError, match="Nothing is written"):
            adapt(settings(tmp_path), changed(job, data=None, namespace="papers"))
    finally:
        os.umask(before)
    assert job.work.stat().st_mode & 0o777 == 0o700
    for name in ("rows.jsonl", "before.json"):
        assert (job.work / name).stat().st_mode & 0o777 == 0o600


def test_each_guard_is_about_what_it_says() -> None:
    """One of 20 answers lost is no proof, nor are two of 50 refusals."""
    before = Measured([80.0] * 20, [40.0] * 20, [True] * 50, 2.0, 1000)
    few = Measured([80.0] * 19 + [0.0], [70.0] * 20, [True] * 48 + [False] * 2, 2.009, 1000)
    assert guards.failures(before, few) == []
    [one] = guards.failures(before, Measured([0.0] * 8 + [80.0] * 12, [70.0] * 20, [True] * 50, 2.0, 1000))
    assert one == "whole prompts lose 32.0 points of F1 (n 20, at 95 % at least 7.4; allowed 1)"
    [one] = guards.failures(before, Measured([80.0] * 20, [70.0] * 20, [True] * 50, 2.0101, 1000))
    assert one.startswith("perplexity on 1,000 tokens of text rises by 1.0 %")
    fewer = [True] * 40 + [False] * 10
    [one] = guards.failures(before, Measured([80.0] * 20, [70.0] * 20, fewer, 2.0, 1000))
    assert one == (
        "questions without an answer are refused less often by 20.0 points (n 50, at 95 % at least 7.5; "
        "allowed 2)"
    )
    broken = Measured([float("nan")] * 20, [70.0] * 20, [False] * 50, float("nan"), 1000)
    assert len(guards.failures(before, broken)) == 3
    assert guards.recovered(before, Measured([80.0] * 20, [70.0] * 20)) == 0.75
    assert guards.recovered(Measured([80.0], [79.5]), Measured([80.0], [80.0])) is None


@pytest.mark.parametrize(
    ("n", "lost", "least", "most"), [(20, 0.0, 0, 0.02), (100, 0.01, 0, 0.05), (400, 0.1, 0.95, 1)]
)
def test_a_model_is_refused_by_what_is_shown(n: int, lost: float, least: float, most: float) -> None:
    """A 25th of the answers is lost and as many are gained by chance, beside what is really lost."""
    draw = random.Random(0)
    refused = 0
    for _ in range(200):
        before, after = Measured(loss=2.0), Measured(loss=2.0)
        for _ in range(n):
            at = draw.random()
            before.whole.append(0.0 if at < 0.04 else 100.0)
            after.whole.append(0.0 if 0.04 <= at < 0.08 + lost else 100.0)
        refused += bool(guards.failures(before, after))
    assert least <= refused / 200 <= most


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "mistral"}, "type mistral; only models of the types llama, qwen2, qwen3"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "rope of type yarn"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised weights"),
        ({"use_sliding_window": True}, "sliding window"),
        (None, "no model folder"),
    ],
)
def test_models_that_cannot_be_adapted(
    job: Adaptation, model: Path, tmp_path: Path, config: dict[str, Any] | None, words: str
) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(model / "model.safetensors")
    if config is not None:
        known = json.loads((model / "config.json").read_text())
        known = {name: value for name, value in known.items() if not name.startswith("rope")}
        (folder / "config.json").write_text(json.dumps(known | config))
    with pytest.raises(RagserveError, match=words):
        adapt(settings(tmp_path), changed(job, model=folder))
    assert not job.work.exists()


def test_a_model_without_a_chat_template(job: Adaptation, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    folder.mkdir()
    for path in model.iterdir():
        (folder / path.name).symlink_to(path)
    about = json.loads((model / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").unlink()
    del about["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    with pytest.raises(RagserveError, match="no chat template"):
        adapt(settings(tmp_path), changed(job, model=folder))


def test_an_out_that_exists_or_has_no_room(
    job: Adaptation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_folder.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(RagserveError, match="has 0 MiB left and the adapted model takes"):
        adapt(settings(tmp_path), job)
    job.out.mkdir()
    with pytest.raises(RagserveError, match="exists already"):
        adapt(settings(tmp_path), job)
    with pytest.raises(RagserveError, match="the model's folder"):
        adapt(settings(tmp_path), changed(job, out=job.model / "adapted"))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"question": "Who?", "passages": []}', "line 61: passages"),
        ('{"question": " ", "passages": [{"text": "a"}]}', "line 61: question"),
        (
            '{"question": "Who?", "passages": [{"text": "a"}], "gold": [1]}',
            "names a passage that is not among",
        ),
        ("[]", "line 61"),
        ("{", "line 61: not JSON"),
    ],
)
def test_bad_rows_are_named(job: Adaptation, tmp_path: Path, line: str, words: str) -> None:
    assert job.data is not None
    job.data.write_text(job.data.read_text() + line + "\n")
    with pytest.raises(RagserveError, match=words):
        adapt(settings(tmp_path), job)
    assert not job.work.exists(), "mended rows would be another run's"


def test_questions_that_do_not_fit_are_named_before_anything_is_made(job: Adaptation, tmp_path: Path) -> None:
    long = [row.model_copy(update={"question": f"{row.question} {'so ' * 600}?"}) for row in rows(2)]
    data = write(tmp_path / "long.jsonl", [*rows(6, passages=3), long[0], *rows(60)[8:], long[1]])
    data.write_text("\n" + data.read_text())
    with pytest.raises(RagserveError, match=r"2 of 60 lines leave no room .* 509 tokens: line 8, 61\."):
        adapt(settings(tmp_path), changed(job, data=data))
    assert {path.name for path in job.work.iterdir()} <= {"lock"}, "mended rows would be another run's"


def test_too_few_questions(job: Adaptation, tmp_path: Path) -> None:
    data = write(tmp_path / "few.jsonl", rows(49))
    with pytest.raises(RagserveError, match="There are 49 questions; at least 50"):
        adapt(settings(tmp_path), changed(job, data=data))
    assert not job.work.exists()


def test_held_out_questions_whose_passage_does_not_fit_are_not_measured(
    job: Adaptation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guards, "failures", lambda before, after: [])
    given = [longer(row, 600) if n % 6 == 0 else row for n, row in enumerate(rows(96, passages=2))]
    data = write(tmp_path / "long.jsonl", given)
    said: list[str] = []
    record = adapt(
        settings(tmp_path), changed(job, data=data, held_out=19), lambda phase, counts: said.append(counts)
    )
    [left_out] = [each for each in said if "are not measured" in each]
    count = int(left_out.split()[0])
    assert left_out == f"{count} of 19 are not measured: the passages that answer do not fit"
    assert count > 0
    assert record["after"]["questions"] == 19 - count


def test_passages_that_mostly_do_not_fit_are_refused(job: Adaptation, tmp_path: Path) -> None:
    data = write(tmp_path / "long.jsonl", [longer(row, 600) for row in rows(60, passages=2)])
    with pytest.raises(
        RagserveError, match="10 of 10 held-out questions have passages that answer but do not"
    ):
        adapt(settings(tmp_path), changed(job, data=data))


def test_two_runs_at_once_are_one_too_many(job: Adaptation, tmp_path: Path) -> None:
    job.work.mkdir()
    with adaptation.locked(job.work / "lock"), pytest.raises(RagserveError, match="Another run uses"):
        adapt(settings(tmp_path), job)


def test_a_folder_with_other_files_is_refused_and_stays(job: Adaptation, tmp_path: Path) -> None:
    job.work.mkdir()
    (job.work / "thesis.txt").write_text("years")
    with pytest.raises(RagserveError, match="not empty, and no run"):
        adapt(settings(tmp_path), job)
    assert [path.name for path in job.work.iterdir()] == ["thesis.txt"]
    with pytest.raises(RagserveError, match="is in it"):
        adapt(settings(tmp_path), changed(job, work=tmp_path))
    assert job.data is not None
    assert job.data.exists()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"room": 384}, "--pack-tokens is 384. Give 0, or at least 512"),
        ({"training": TrainingOptions(60.0, rate=0.0)}, "--rate is 0"),
        ({"training": TrainingOptions(60.0, rate=float("nan"))}, "--rate is nan"),
    ],
)
def test_numbers_that_no_training_can_be_made_of(
    job: Adaptation, tmp_path: Path, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(RagserveError, match=words):
        adapt(settings(tmp_path), changed(job, **fields))
    assert not job.work.exists()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), "memory of this machine is full.*--pack-tokens"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "memory of this machine is full"),
        (OSError(errno.ENOSPC, "No space left on device", "work/best-2.part"), "best-2.part: No space left"),
    ],
)
def test_full_memory_and_disks_are_said(
    job: Adaptation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    def full(*args: Any) -> None:
        raise error

    monkeypatch.setattr(adaptation.guards, "references", full)
    with pytest.raises(RagserveError, match=words):
        adapt(settings(tmp_path), job)


def test_weights_that_are_damaged(job: Adaptation, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cut"
    shutil.copytree(model, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(RagserveError, match=r"weights of .* cannot be read: .*Download") as caught:
        adapt(settings(tmp_path), changed(job, model=folder))
    assert "\n" not in str(caught.value)


def test_a_full_disk_names_the_adapter(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    loaded = load(model)
    loaded.add_adapter(2, 0)
    loaded.round_adapter("float32")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*adapter_model.safetensors'"):
        loaded.save_adapter(tmp_path / "adapter", "base")


def test_a_run_is_told_from_others_by_all_that_its_rows_and_prompts_come_of(
    job: Adaptation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class StopHere(Exception):
        pass

    def stop(*args: Any, **more: Any) -> None:
        raise StopHere

    monkeypatch.setattr(adaptation.AdaptedModel, "load", stop)
    prefix = tmp_path / "prefix.txt"
    prefix.write_text("one")
    given = settings(tmp_path).model_copy(update={"kv_prefix": str(prefix), "system_prompt": "Say it."})
    job = changed(job, data=None, namespace="papers")
    with pytest.raises(StopHere):
        adapt(given, job)
    assert "Say it." not in (job.work / "run.json").read_text()
    for fields, name in (
        ({"system_prompt": "You are a judge."}, "system_prompt_digest"),
        ({"retrieval": "other"}, "retrieval"),
        ({"embedder": "other"}, "embedder"),
    ):
        with pytest.raises(RagserveError, match=f"differs in {name}"):
            adapt(given.model_copy(update=fields), job)
    for more, name in (({"room": 1024}, "pack_tokens"), ({"questions": 60}, "most_questions")):
        with pytest.raises(RagserveError, match=f"differs in {name}"):
            adapt(given, changed(job, **more))
    prefix.write_text("another")
    with pytest.raises(RagserveError, match="differs in kv_prefix_digest"):
        adapt(given, job)


def test_what_a_killed_run_left_beside_out_is_removed(
    job: Adaptation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_folder, "remove_unfinished", lambda work: None)  # killed before it
    job.work.mkdir()
    with pytest.raises(FileNotFoundError):
        model_folder.write_model(job.out, job.model, {}, job.work)
    monkeypatch.undo()
    [left] = [path for path in tmp_path.iterdir() if path.name.startswith(".out.")]
    assert (left / "config.json").exists()
    (tmp_path / ".out.backup").mkdir()
    (job.work / "run.json").write_text("{}")
    with pytest.raises(RagserveError, match="another run"):
        adapt(settings(tmp_path), job)
    assert not left.exists()
    assert (tmp_path / ".out.backup").exists()
