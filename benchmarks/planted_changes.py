"""After how many compared answers a strategy leaves `auto` on a real engine, where something was changed on
purpose.

    python -m benchmarks.planted_changes OUT_DIR CALM.jsonl OTHER.jsonl [--model FOLDER] [--strategy LABEL]
        [--broken LABEL] [--base 150] [--calm 200] [--most 400] [--seconds 540]

CALM and OTHER are question sets. The strategy's rates of different and of unsupported answers are recorded on
the first ``--base`` questions of CALM, as `ragserve tune` records them. Its answers to the following
``--calm`` are compared as a server does in use; then, from there and each by itself, at most ``--most`` under
a change:

* ``broken``: what answers is ``--broken``, under the strategy's name;
* ``replaced``: OTHER's questions over OTHER's documents;
* ``none``: more of CALM, from its beginning.

Rows are kept in OUT_DIR: the same command goes on. Needs SGLang; CPU will do: two prompts a question."""

from __future__ import annotations

import argparse
import itertools
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ragserve.answering.in_flight import QueryLimiter
from ragserve.answering.prompt import PromptBuilder, PromptDocument
from ragserve.answering.scores import SCORED
from ragserve.config import Settings, load
from ragserve.engine.base import GenerateRequest
from ragserve.engine.local import LocalEngine
from ragserve.engine.offline import run_once
from ragserve.eval.data import Question
from ragserve.eval.data import load as load_set
from ragserve.profiles import gate, in_use
from ragserve.profiles.figures import Figures
from ragserve.profiles.gate import Entry, Gate
from ragserve.profiles.in_use import InUse, InUseRecord
from ragserve.strategy_spec import StrategySpec, parse
from ragserve.verification import report
from ragserve.verification.answer_watch import AnswerWatch
from ragserve.verification.question_probes import SHORT
from ragserve_index import IndexStore

NAMESPACE = "planted"
CHANGES = ("broken", "replaced", "none")
NOTE = (
    "different, unsupported: percent of the answers compared in this phase; recorded: as the record has "
    "them, with half a standard error. left after: compared answers since the change until auto no longer "
    "takes the strategy; None: not within this phase."
)


class Planted:
    """The phases of a run on one engine."""

    def __init__(self, given: argparse.Namespace, engine: LocalEngine, settings: Settings) -> None:
        self.given, self.engine = given, engine
        self.builder = PromptBuilder.load(engine.info.tokenizer, settings.system_prompt)
        [self.spec], [self.broken] = parse(given.strategy), parse(given.broken)
        for each in (self.spec, self.broken):
            if each.name in SCORED or each.chooses_passages:
                raise SystemExit(f"{each.label} needs a search: give a strategy that reads all passages")
        self.until = time.monotonic() + given.seconds
        self.store = IndexStore(given.out / "data")
        self.store.ensure_namespace(NAMESPACE, embedder="none", dim=4)

    def record(self, phase: str) -> InUseRecord:
        info = self.engine.info
        place = self.given.out / phase / in_use.FILE_NAME
        about = {"dtype": info.dtype, "samkv": info.samkv, "prefix": info.prefix}
        return InUseRecord(place, info.fingerprint, **about)

    def found(self, phase: str) -> InUse:
        own = self.record(phase).entries().get(NAMESPACE, {})
        return own.get(self.spec.label, InUse(""))

    async def compared(
        self, phase: str, questions: Iterator[Question], most: int, spec: StrategySpec
    ) -> None:
        """Compare answers of a phase until ``most`` are, or the strategy is out, or the time is up."""
        info = self.engine.info
        identity = info.gate_identity | {"model": Path(info.model).name}
        base = Gate([self.given.out / gate.FILE_NAME], **identity)
        (self.given.out / phase).mkdir(exist_ok=True)
        record = self.record(phase)
        parts = (self.engine, self.store, base, record, QueryLimiter(4), self.builder, 1.0)
        watch = AnswerWatch(*parts, draw=lambda: 0.0)
        begin = self.found("calm").compared if phase in CHANGES else 0
        for question in itertools.islice(questions, self.found(phase).compared - begin, most):
            if self.found(phase).out or time.monotonic() > self.until:
                return
            full = self.request(question)
            own = replace(full, strategy=spec.name, options=dict(spec.options))
            await self.engine.warm(own)
            if base.verified(NAMESPACE):
                watch.answered(self.spec, own, full, None)
            while (work := watch.work()) is not None:
                await work
            print(phase, self.found(phase).figures, flush=True)

    def request(self, question: Question) -> GenerateRequest:
        documents = [PromptDocument("", each.title, each.text) for each in question.documents]
        room = self.engine.info.max_prompt_tokens - 64
        prompt = self.builder.build(question.question, documents, max_prompt_tokens=room, system=SHORT)
        return GenerateRequest("planted", prompt.input_ids, NAMESPACE, "full", spans=prompt.spans)

    def verify(self, figures: Figures) -> None:
        """Record the strategy as verified."""
        info = self.engine.info
        sets = {gate.set_of(NAMESPACE): figures}
        about = {"samkv": info.samkv, "prefix": info.prefix, "sparse": info.sparse}
        entry = Entry(sets, Path(info.model).name, "", "", info.dtype, **about)
        gate.record(self.given.out / gate.FILE_NAME, info.fingerprint, {self.spec.label: entry})


async def work(given: argparse.Namespace, engine: LocalEngine, settings: Settings) -> list[dict[str, Any]]:
    """All phases, as far as there is time; a row for each."""
    planted = Planted(given, engine, settings)
    calm, other = load_set(given.calm_set), load_set(given.other_set)
    blank = Figures(n=1, f1=None, f1_vs_full=None, kl=None, kept=100.0, recomputed=None, references=1)
    planted.verify(replace(blank, margin=0.0, score=100.0))
    await planted.compared("base", iter(calm), given.base, planted.spec)
    base = planted.found("base")
    shares = {
        name: 100 * getattr(base, name) / max(1, base.compared) for name in ("different", "unsupported")
    }
    planted.verify(replace(blank, n=base.compared, margin=0.0, score=100.0, **shares))
    if base.compared >= given.base:
        rest = itertools.cycle(calm[given.base :] or calm)
        await planted.compared("calm", rest, given.calm, planted.spec)
    if planted.found("calm").compared >= given.calm:
        sources = {"broken": calm, "replaced": other, "none": calm}
        for change in CHANGES:
            if not (given.out / change).exists():
                shutil.copytree(given.out / "calm", given.out / change)
            spec = planted.broken if change == "broken" else planted.spec
            await planted.compared(change, itertools.cycle(sources[change]), given.most, spec)
    return rows(planted)


def rows(planted: Planted) -> list[dict[str, Any]]:
    """A row for each phase that has begun."""
    made, calm = [], planted.found("calm")
    for phase in ("base", "calm", *CHANGES):
        found = planted.found(phase)
        before = calm if phase in CHANGES else InUse("")
        count = found.compared - before.compared
        if count < 1:
            continue
        made.append(
            {
                "phase": phase,
                "compared": count,
                "different %": round(100 * (found.different - before.different) / count, 1),
                "unsupported %": round(100 * (found.unsupported - before.unsupported) / count, 1),
                "recorded %": found.figures["recorded"] if phase != "base" else None,
                "recorded unsupported %": found.figures["unsupported_recorded"] if phase != "base" else None,
                "left after": count if found.out and phase != "base" else None,
            }
        )
    return made


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("calm_set", type=Path)
    parser.add_argument("other_set", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--strategy", default="concat:recompute=sentences,share=0.3")
    parser.add_argument("--broken", default="concat")
    parser.add_argument("--base", type=int, default=150)
    parser.add_argument("--calm", type=int, default=200)
    parser.add_argument("--most", type=int, default=400)
    parser.add_argument("--seconds", type=float, default=540)
    given = parser.parse_args()
    given.out = given.out.resolve()
    given.out.mkdir(parents=True, exist_ok=True)
    settings = load(**({"model": given.model} if given.model else {}))
    settings = settings.model_copy(update={"data_dir": given.out / "data"})
    made = run_once(settings, lambda engine: work(given, engine, settings))
    workload = {
        "model": Path(given.model or "ragserve-tiny").name,
        "strategy": given.strategy,
        "broken": given.broken,
        "calm": given.calm_set.name,
        "other": given.other_set.name,
    }
    report.write("planted-changes", workload, made, out=given.out / "planted-changes.json", note=NOTE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
