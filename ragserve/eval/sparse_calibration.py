"""Measure what a model answers with sparse decoding and prefill, and record it for `--sparse-attention
auto`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ragserve.answering.prompt import PromptBuilder
from ragserve.config import Settings
from ragserve.engine.base import WarmEngine
from ragserve.errors import InvalidRequest
from ragserve.eval.data import by_name, interleaved, load
from ragserve.eval.sparse_answers import DENSE, SparseSetting, SparseTask, ask_all, recorded
from ragserve.profiles.decode import scores_of
from ragserve.profiles.sparse_attention import FILE_NAME, SPARSE, SparseEntry, SparseRecord, under
from ragserve.verification.report import measured_on
from ragserve.verification.rows import Row

BUDGETS = (512, 1024, 2048, 4096)
ALPHAS = (0.9, 0.955)


def tasks_of(paths: Sequence[Path], limit: int | None) -> list[SparseTask]:
    """The questions of all sets, mixed. Raises InvalidRequest for a file that is no question set, and two
    sets of one name."""
    sets = {name: load(path, limit) for name, path in by_name(paths).items()}
    return [SparseTask(name, question) for name, question in interleaved(sets)]


def candidates(scores: str = "exact") -> list[SparseSetting]:
    """What is measured first, each alone. ``scores``: what pages are chosen by."""
    decode = [
        {"mode": "hierarchical", "budget": tokens, "scores": scores, "dense_below": 0} for tokens in BUDGETS
    ]
    prefill = [{"mode": "vertical_slash", "alpha": alpha, "dense_below": 0} for alpha in ALPHAS]
    return [
        *(SparseSetting(f"budget {each['budget']:,}", each) for each in decode),
        *(SparseSetting(f"lines, alpha {each['alpha']}", prefill=each) for each in prefill),
    ]


async def find_and_record(
    settings: Settings,
    engine: WarmEngine,
    tasks: Sequence[SparseTask],
    *,
    in_flight: int,
    report: Callable[[str], None],
) -> SparseRecord:
    """Ask every question densely and under each candidate, then under the cheapest decode and prefill
    settings that hold, together; write the record to the data folder of ``settings``. One of these is chosen
    by its answers, so their bounds hold together: each has its part of the 5 %.

    ``engine``: with `sparse_attention` on, dense by default. Raises InvalidRequest where no question was
    answered."""
    builder = PromptBuilder.load(engine.info.tokenizer, settings.system_prompt)
    alone = candidates(scores_of(settings))
    rows: list[Row] = []
    asked: list[SparseSetting] = []

    def record() -> SparseRecord:
        entries = recorded(asked, rows, among=len(alone) + 1)
        return SparseRecord(under(settings), entries, engine.info.dtype, **measured_on(settings.model))

    async def ask(more: Sequence[SparseSetting]) -> None:
        report(f"asking {len(tasks)} questions: {', '.join(each.label for each in more)}")
        asked.extend(more)
        await ask_all(engine, builder, tasks, more, in_flight=in_flight, finished=(), write=rows.append)

    await ask([SparseSetting(DENSE), *alone])
    found = record()
    if not any(each.n for entry in found.entries for each in entry.sets.values()):
        reasons = sorted({row["error"] for row in rows if row["error"]})
        raise InvalidRequest(f"No question was answered: {reasons[0] if reasons else 'there is none'}")
    holding = {entry.label: entry.read for entry in found.entries if not entry.shortfalls()}
    fitting = sorted(
        (each for each in alone if _label(each) in holding), key=lambda each: holding[_label(each)]
    )
    both = [
        *[each for each in fitting if not each.prefill][:1],
        *[each for each in fitting if each.prefill][:1],
    ]
    if len(both) == 2:
        decode, prefill = both
        await ask([SparseSetting(f"{decode.label}, {prefill.label}", decode.decode, prefill.prefill)])
        found = record()
    SPARSE.save(settings.data_dir / FILE_NAME, engine.info.fingerprint, found)
    return found


def _label(setting: SparseSetting) -> str:
    return SparseEntry(setting.server or {}, {}).label
