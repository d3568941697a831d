"""One run of `ragserve adapt`, from the questions to the adapted model. What a run has found is kept in its
work folder, so that it goes on there after any end."""

from __future__ import annotations

import errno
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragserve.adapt import guards
from ragserve.adapt.checkpoints import Checkpoints, TrainingCourse
from ragserve.adapt.low_rank import AdaptedModel, check_model, digest_of, pack_room
from ragserve.adapt.model_folder import check_out, check_room, remove_unfinished, write_model
from ragserve.adapt.sample_mix import SampleMix, leaves_room, shuffled
from ragserve.adapt.training import OnProgress, Training, TrainingOptions
from ragserve.adapt.training_rows import TrainingRow, digest_of_rows, divided, read_rows, write_rows
from ragserve.adapt.work_folder import LOCK, RUN, check_work, remove_work
from ragserve.errors import Conflict, InvalidRequest, RagserveError, StorageFull
from ragserve.files import locked, write_json
from ragserve.json_lines import json_lines
from ragserve.verification.report import environment

if TYPE_CHECKING:
    from ragserve.answering.prompt import PromptBuilder
    from ragserve.config import Settings

_ROWS, _BEFORE = "rows.jsonl", "before.json"
_LEAST_ROOM = 512  # tokens of a pack
_NAMED = 10  # lines
_FORM = 3  # of prompts: a run that was begun with another measures other ones
_KL_QUESTIONS = 100  # held-out ones that are compared in training, every few steps


@dataclass(frozen=True, slots=True)
class Adaptation:
    """``model`` and ``out`` are folders. Questions come from the file ``data``, else from ``namespace``, at
    most ``questions`` of them. ``held_out``: for the guards, at most a fifth. ``room``: tokens of a pack; 0
    for what suits the machine."""

    model: Path
    out: Path
    work: Path
    training: TrainingOptions
    namespace: str = ""
    data: Path | None = None
    questions: int = 4000
    held_out: int = 400
    rank: int = 16
    seed: int = 0
    room: int = 0


def adapt(
    settings: Settings,
    job: Adaptation,
    on_progress: OnProgress = lambda phase, counts: None,
    on_step: Callable[[int], None] = lambda step: None,
) -> dict[str, Any]:
    """Adapt a model and return the record that OUT has, too. ``on_step``: called with the steps taken, after
    each. Raises RagserveError, and writes no OUT, where the held-out KL never falls or a guard fails."""
    config = check_model(job.model)
    _check_numbers(job, config)
    check_out(job.out, job.model)
    check_work(job.work, job.out, job.model, *([job.data] if job.data else []))
    rows = read_rows(job.data) if job.data else None
    if rows is not None:
        divided(rows, job.held_out, job.seed)  # before a model is loaded for nothing
    job.work.mkdir(mode=0o700, parents=True, exist_ok=True)  # users' questions will be in it
    with locked(job.work / LOCK) as alone, _explained():
        if not alone:
            raise Conflict(
                f"Another run uses {job.work}.",
                hint="Wait for it, or give another --work.",
                code="work_in_use",
            )
        remove_unfinished(job.work)
        check_room(job.out, job.model)
        record = _AdaptRun(settings, job, config, rows, on_progress).adapted(on_step)
        remove_work(job.work)
    return record


def _check_numbers(job: Adaptation, config: dict[str, Any]) -> None:
    """Raise InvalidRequest for numbers that no training can be made of."""
    if not 0 < job.training.rate < math.inf:
        raise InvalidRequest(f"--rate is {job.training.rate:g}.", hint="Give one above 0, like 2e-4.")
    if job.room and job.room < _LEAST_ROOM:
        raise InvalidRequest(f"--pack-tokens is {job.room}.", hint=f"Give 0, or at least {_LEAST_ROOM}.")
    longest = int(config.get("max_position_embeddings", _LEAST_ROOM))
    if longest < _LEAST_ROOM:
        raise InvalidRequest(
            f"{job.model} reads {longest} tokens; {_LEAST_ROOM} are needed.", hint="Give another model."
        )


def _check_questions(rows: Sequence[TrainingRow], data: Path, builder: PromptBuilder, room: int) -> None:
    """Raise InvalidRequest for questions that leave no room for a passage."""
    long = [n for n, row in enumerate(rows) if not leaves_room(row, builder, room)]
    if long:
        lines = [number for number, _ in json_lines(data)]
        named = ", ".join(f"{lines[n]:,}" for n in long[:_NAMED])
        more = f" and {len(long) - _NAMED:,} more" if len(long) > _NAMED else ""
        raise InvalidRequest(
            f"{data}: the questions of {len(long):,} of {len(rows):,} lines leave no room for a passage in a "
            f"prompt of {room:,} tokens: line {named}{more}.",
            hint="Shorten these questions, leave them out, or give a larger --pack-tokens.",
        )


@contextmanager
def _explained() -> Iterator[None]:
    """Raise RagserveError for memory or a disk that is full."""
    import torch

    try:
        yield
    except (RuntimeError, MemoryError) as error:
        full = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        if not full and "can't allocate memory" not in str(error):
            raise
        raise RagserveError(
            "The memory of this machine is full.",
            hint="Give a smaller --pack-tokens, with another --work: a run keeps its own.",
            code="out_of_memory",
        ) from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise StorageFull(
            f"{error.filename or 'A file'}: {error.strerror}.",
            hint="Free some space and run the same command again.",
        ) from error


class _AdaptRun:
    """A run with its model in memory."""

    def __init__(
        self,
        settings: Settings,
        job: Adaptation,
        config: dict[str, Any],
        given: list[TrainingRow] | None,
        on_progress: OnProgress,
    ) -> None:
        from ragserve.answering.prompt import PromptBuilder
        from ragserve.engine.document_prefix import prefix_ids

        on_progress("loading the model", job.model.name)
        self._settings, self._job, self._config, self._progress = settings, job, config, on_progress
        self._given = given
        self._builder = PromptBuilder.load(str(job.model), settings.system_prompt)
        if not getattr(self._builder.tokenizer, "chat_template", None):
            raise InvalidRequest(
                f"{job.model} has no chat template.",
                hint="Give an instruction-tuned model: others do not answer.",
            )
        longest = int(config.get("max_position_embeddings", pack_room(job.room)))
        self._room = min(pack_room(job.room), longest) - job.training.answer_tokens
        if given is not None and job.data is not None:
            _check_questions(given, job.data, self._builder, self._room)
        prefix = prefix_ids(settings, self._builder.tokenizer)
        self._identity = self._identified(prefix)
        self._model = AdaptedModel.load(job.model, prefix, self._builder.tokenizer, room=job.room)
        if self._model.no_flex and self._model.device.type == "cuda":
            on_progress("attention", f"masks instead of FlexAttention: {self._model.no_flex}")
        text = files("sglang_ext.analysis").joinpath("unrelated_contexts.txt").read_text(encoding="utf-8")
        self._general = [part.strip() for part in text.split("\n====\n")]

    def adapted(self, on_step: Callable[[int], None]) -> dict[str, Any]:
        """Train, measure and write."""
        job, model, rows = self._job, self._model, self._rows()
        train, held_out = divided(rows, job.held_out, job.seed)
        mix = SampleMix(
            train,
            self._builder,
            k=self._settings.top_k,
            room=self._room,
            seed=job.seed,
            answer_tokens=job.training.answer_tokens,
        )
        before, wanted = self._before(mix, held_out)
        model.add_adapter(job.rank, job.seed)
        compared = sorted(shuffled(len(held_out), f"{job.seed} KL")[:_KL_QUESTIONS])
        prompts = [
            mix.sequence(held_out[n].question, mix.context(held_out[n], n), composed=True) for n in compared
        ]
        checkpoints = Checkpoints(job.work)
        training = Training(model, mix, prompts, checkpoints, job.training, self._progress, on_step=on_step)
        course = training.run()
        stored = str(self._config.get("dtype") or self._config.get("torch_dtype") or "float32")
        model.round_adapter(stored)
        model.save_adapter(job.work / "adapter", str(job.model))
        model.merge(job.model, job.work / "merged")
        after = self._measured("after", mix, held_out, wanted)
        record = self._record(course, before, after, len(train), len(prompts), digest_of_rows(rows))
        if failed := guards.failures(before, after):
            write_json(job.work / "refused.json", record)
            raise RagserveError(
                f"Nothing is written, as the adapted model is worse: {'; '.join(failed)}.",
                hint=f"What was measured is in {job.work / 'refused.json'}. Try more or other questions, or "
                "a smaller --rate.",
                code="guards_failed",
            )
        self._progress("writing", job.out.name)
        write_model(job.out, job.model, record, job.work)
        return record

    def _identified(self, prefix: Sequence[int]) -> dict[str, Any]:
        """What tells runs apart. Raises Conflict where the work folder has another one's. The system text may
        be private, so that its digest stands for it."""
        job, settings = self._job, self._settings
        is_made = bool(job.namespace)
        run: dict[str, Any] = {
            "base": job.model.name,
            "base_digest": digest_of(job.model),
            "data": job.data.name if job.data else None,
            "data_digest": digest_of_rows(self._given) if self._given else None,
            "namespace": job.namespace or None,
            "most_questions": job.questions if is_made else None,
            "retrieval": settings.retrieval if is_made else None,
            "embedder": settings.embedder if is_made else None,
            "system_prompt_digest": _digest(settings.system_prompt or ""),
            "prompt_form": _FORM,
            "kv_prefix": settings.kv_prefix,
            "kv_prefix_digest": _digest(json.dumps([*prefix])),
            "pack_tokens": job.room,
            "top_k": settings.top_k,
            "rank": job.rank,
            "seed": job.seed,
            "batch": job.training.batch,
            "rate": job.training.rate,
            "answer_tokens": job.training.answer_tokens,
            "held_out": job.held_out,
        }
        place = job.work / RUN
        if place.exists() and (there := json.loads(place.read_text(encoding="utf-8"))) != run:
            names = sorted(name for name in run.keys() | there.keys() if run.get(name) != there.get(name))
            raise Conflict(
                f"{job.work} has another run, which differs in {', '.join(names)}.",
                hint="Remove it to begin anew, or give another --work.",
                code="another_run",
            )
        write_json(place, run)
        return run

    def _rows(self) -> list[TrainingRow]:
        """The questions: of the file, or made of the namespace, once a run."""
        job, place = self._job, self._job.work / _ROWS
        if self._given is not None:
            return self._given
        if not place.exists():
            from ragserve.adapt.namespace_rows import make_rows

            made = make_rows(
                self._settings,
                job.namespace,
                self._model,
                self._builder,
                self._room,
                job.questions,
                self._progress,
            )
            write_rows(place, made)
        return read_rows(place)

    def _before(
        self, mix: SampleMix, rows: list[TrainingRow]
    ) -> tuple[guards.Measured, list[tuple[str, ...]]]:
        """The base's figures and the references, measured once a run."""
        place = self._job.work / _BEFORE
        if not place.exists():
            self._progress("before", "references")
            wanted = guards.references(self._model, mix, rows, partial(self._progress, "held-out questions"))
            before = self._measured("before", mix, rows, wanted)
            write_json(place, {"before": asdict(before), "wanted": wanted}, mode=0o600)
        there = json.loads(place.read_text(encoding="utf-8"))
        return guards.Measured(**there["before"]), [tuple(each) for each in there["wanted"]]

    def _measured(
        self, phase: str, mix: SampleMix, rows: list[TrainingRow], wanted: list[tuple[str, ...]]
    ) -> guards.Measured:
        return guards.measure(
            self._model,
            mix,
            rows,
            wanted,
            self._general,
            tokens=self._job.training.answer_tokens,
            on_progress=lambda what: self._progress(phase, what),
        )

    def _record(
        self,
        course: TrainingCourse,
        before: guards.Measured,
        after: guards.Measured,
        questions: int,
        compared: int,
        digest: str,
    ) -> dict[str, Any]:
        best = next(each for each in course.history if each["step"] == course.best_step)
        ran = environment()
        return {
            **self._identity,
            "data_digest": digest,
            "questions": questions,
            "steps": course.step,
            "best_step": course.best_step,
            "skipped_steps": course.skipped,
            "stopped": course.stopped or None,
            "training_seconds": round(course.seconds),
            "kl_before": course.history[0],
            "kl_after": best,
            "kl_questions": compared,
            "before": before.row(),
            "after": after.row(),
            "lost": guards.losses(before, after),
            "recovered": guards.recovered(before, after),
            "attention": "masks" if self._model.no_flex else "FlexAttention",
            "machine": {name: ran[name] for name in ("gpu", "cpu", "cores")},
            "versions": ran["versions"] | {"peft": version("peft")},
            "date": ran["date"],
        }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
