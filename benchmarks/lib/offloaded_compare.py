"""Answers of the offloaded stress (gpu_offloaded_stress.py) beside those of an engine that has room for all:
how far they are apart, and how much of it is pages that were chosen otherwise."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib import offloaded_choices
from benchmarks.lib.offloaded_choices import FOLLOW, PHASE, Choice, Key, Parting
from benchmarks.lib.offloaded_jobs import Answer, Job, send
from benchmarks.lib.rounding import apart

Samples = dict[str, list[tuple[Job, Answer]]]
"""By kind: requests of the stress and their answers."""
PHASES = ("resident", "led", "crowd")
"""On the device by pages of their own choice; on the device by the pages that the request of the stress has
chosen; on the device again, in a crowd and without the prefix cache, so that sums are in another order."""


@dataclass
class Compared:
    """One answer.

    Attributes:
        apart: from the resident answer: the largest difference of log-probabilities up to the first token
            that differs, and at which token of the answer it is. same: the tokens are the same.
        led: the same, of the answer on the device by the same pages; None in modes that choose in every step.
        crowd: the same, of the resident answer from the one in a crowd.
        pages, crowd_pages: how the choices differ, of the answer from the resident one, and of that from the
            one in a crowd; None in modes that choose in every step.
    """

    kind: str
    mode: str
    prompt: int
    tokens: int
    retracted: int
    offloaded_steps: int
    segmented: bool
    same: bool
    apart: tuple[float, int]
    led: tuple[float, int] | None
    crowd: tuple[float, int]
    pages: dict[str, Any] | None
    crowd_pages: dict[str, Any] | None


async def compare(
    engine: Any, samples: Samples, folder: Path, *, places: Sequence[int], rounding: float
) -> dict[str, Any]:
    """Answer all samples in each phase, and compare. ``folder``: of `offloaded_choices`. ``places``: requests
    at once, alone and in a crowd. Return what `report_of` takes, by kind, and every answer."""
    again: dict[str, list[list[Answer]]] = {}
    for phase in PHASES:
        (folder / PHASE).write_text(phase, encoding="utf-8")
        if phase == "led":
            (folder / FOLLOW).write_text("stress", encoding="utf-8")
        else:
            (folder / FOLLOW).unlink(missing_ok=True)
        if phase == "crowd":
            await engine.control("evict", tiers=["device"])
        room = asyncio.Semaphore(places[phase == "crowd"])
        sets = [
            asyncio.gather(*(_again(engine, job, room) for job, _ in pairs)) for pairs in samples.values()
        ]
        if phase == "crowd":  # kinds beside each other
            answers = await asyncio.gather(*sets)
        else:
            answers = [await each for each in sets]
        again[phase] = [list(each) for each in answers]
        await engine.control("check")  # choices are written down
    chosen = offloaded_choices.by_job(folder)
    found: dict[str, Any] = {}
    for number, (kind, pairs) in enumerate(samples.items()):
        compared, failed = [], []
        for place, (job, answer) in enumerate(pairs):
            resident, led, crowd = (again[phase][number][place] for phase in PHASES)
            if errors := [each.error for each in (resident, led, crowd) if each.error]:
                failed.append(errors[0])
                continue
            compared.append(_compared(job, answer, (resident, led, crowd), chosen))
        found[kind] = summary(compared, rounding) | {"failed": failed[:3]}
        shown = {name: value for name, value in found[kind].items() if name not in ("answers", "apart")}
        print(kind, shown, flush=True)
    return found


async def _again(engine: Any, job: Job, room: asyncio.Semaphore) -> Answer:
    async with room:
        answer = await send(engine, job.resident)
    if answer.ended != "answered" and not answer.error:
        answer.error = answer.ended
    if answer.report is not None and answer.report.offloaded_steps:
        answer.error = "it was offloaded"
    return answer


def _compared(
    job: Job,
    answer: Answer,
    others: tuple[Answer, Answer, Answer],
    chosen: dict[Key, dict[int, Choice]],
) -> Compared:
    resident, led, crowd = others
    said, mode = answer.report, str(job.decode["mode"])
    chooses = mode == "hierarchical"
    name = offloaded_choices.job_of(job.ids, job.decode)
    own, its, crowds = (chosen.get(Key(phase, name), {}) for phase in ("stress", "resident", "crowd"))
    return Compared(
        job.kind,
        mode,
        len(job.ids),
        len(answer.ids),
        answer.retracted,
        0 if said is None else said.offloaded_steps,
        bool(said is not None and said.segmented_tokens),
        answer.ids == resident.ids,
        _apart(answer, resident),
        _apart(answer, led) if chooses else None,
        _apart(resident, crowd),
        _pages(own, its, len(job.ids), answer, resident) if chooses else None,
        _pages(its, crowds, len(job.ids), resident, crowd) if chooses else None,
    )


def _apart(one: Answer, other: Answer) -> tuple[float, int]:
    """Return the largest difference up to the first token that differs, and its token."""
    _, most = apart((one.ids, one.logprobs, None), (other.ids, other.logprobs, None))
    until = _same(one, other) + 1
    differences = [abs(a - b) for a, b in zip(one.logprobs[:until], other.logprobs[:until], strict=True)]
    return round(most, 5), differences.index(max(differences)) if differences else 0


def _same(one: Answer, other: Answer) -> int:
    """Return how many tokens of two answers are the same."""
    same = 0
    while same < len(one.ids) and one.ids[same] == other.ids[same]:
        same += 1
    return same


def _pages(
    one: dict[int, Choice], other: dict[int, Choice], prompt: int, a: Answer, b: Answer
) -> dict[str, Any]:
    found: Parting = offloaded_choices.parting(one, other, prompt + _same(a, b))
    first = None if found.first is None else found.first - prompt
    return found._asdict() | {"first": first, "gap": round(found.gap, 6), "heads": round(found.heads, 4)}


def summary(compared: list[Compared], rounding: float) -> dict[str, Any]:
    """Summarise the answers of one kind, or of all. ``rounding``: how far apart it explains."""

    def figures(name: str, values: list[float]) -> dict[str, Any]:
        far = sum(each > rounding for each in values)
        middle = round(statistics.median(values), 4) if values else None
        worst = round(max(values), 4) if values else None
        return {f"{name} median": middle, f"{name} worst": worst, f"{name} beyond rounding": far}

    own = [each.apart[0] for each in compared]
    choosing = [each for each in compared if each.pages is not None]
    alike = [each.apart[0] for each in choosing if each.pages and each.pages["first"] is None]
    shifts = {"pages": 0.0, "crowd_pages": 0.0}
    for name in shifts:
        shown = [getattr(each, name) for each in choosing]
        shifts[name] = max((each["shift"][1] for each in shown if each), default=0.0)
    return {
        "compared": len(compared),
        "same tokens": sum(each.same for each in compared),
        "apart": own,
        **figures("apart", own),
        **figures("by the same pages", [each.led[0] for each in compared if each.led is not None]),
        **figures("on the device, again", [each.crowd[0] for each in compared]),
        "choose": len(choosing),
        "choose otherwise": len(choosing) - len(alike),
        "worst of the others": round(max(alike), 4) if alike else None,
        "again, otherwise": sum(
            each.crowd_pages is not None and each.crowd_pages["first"] is not None for each in choosing
        ),
        "scores moved": round(shifts["pages"], 5),
        "scores moved, again": round(shifts["crowd_pages"], 5),
        "answers": [asdict(each) for each in compared],
    }
