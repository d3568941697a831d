"""The stages of requests on the scheduler's thread. A stage that fails ends the requests that it was at work
for, and the scheduler goes on.

An exception that leaves the scheduler's loop ends the server. So whatever ragserve does there goes through
`run`, or `run_alike`. Where ranks share a model, an exception that only one of them meets in the middle of a
forward pass leaves the others in a collective, and ends the server (`sglang_ext.ranks.rank_failures`).

Tests raise in every stage in turn: with the environment variable `FAULTS_VARIABLE` set, control operation
`fault` makes a stage fail once.
"""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, TypeVar

import torch

log = logging.getLogger(__name__)
FAULTS_VARIABLE = "RAGSERVE_FAULTS"

STAGES = {  # name: work
    "request": "reads a new request's plan",
    "decode options": "reads a new request's decode and prefill options",
    "queue": "brings waiting composed requests on, and drops those that have left the queue",
    "admission": "decides on a composed request and reserves its slots",
    "accounting": "counts what an admitted request uses",
    "load": "finds and locks documents, and loads them from disk",
    "analysis": "brings the analyses that waiting requests need",
    "stored analysis": "finds a document's analysis in memory or in a tier",
    "new analysis": "computes a document's analysis",
    "query": "runs the questions of waiting requests",
    "selection": "chooses the kept tokens of a waiting request",
    "usage": "counts the slots in use",
    "decode plan": "plans a decode step, or the sparse prefill and page statistics of an extend",
    "offsets": "notes how far the requests of an extend are ahead of their slots",
    "composition": "fills the slots of composed requests",
    "gather": "brings documents' KV into the slots, within composition",
    "question": "measures what questions attend to, within composition",
    "recompute": "runs the recompute pass, within composition",
    "unlock": "unlocks the documents of composed requests",
    "positions": "moves questions and answers to their positions",
    "forward": "runs SGLang's forward pass",
    "sparse prefill": "chooses the key blocks that a sparse prefill attends to in a layer",
    "output": "gives SGLang what the recompute pass has computed of its forward pass",
    "distribution": "sends the distributions of tokens, and forces given ones",
    "stop strings": "looks for the beginning of a stop string in the newest tokens",
    "seed": "counts the tokens of answers with a seed",
    "seeded draw": "draws the tokens of answers with a seed",
    "grammar": "ends requests whose grammar allows no token",
    "graph": "names the CUDA graph of a decode step",
    "extended": "ends the stages of an extend",
    "document": "analyses a document at its ingestion",
    "segments": "prefills a prompt that the pool cannot take, layer by layer onto host pages",
    "offload plan": "decides what offloaded requests hold, and the room to keep free for them",
    "offload admission": "admits a request whose prompt is on the host, or is to be brought there",
    "offloading": "gives an offloaded request its resident blocks, or takes its prompt from the device",
    "statistics": "follows a forward pass with statistics of pages, choices and copies to the host",
    "report": "writes the reports of composed requests",
    "release": "reports on an ended request and completes the statistics of its pages",
    "lines": "keeps the lines of a sparse prefill for later turns",
    "save": "copies a document's KV to the other tiers",
    "ended": "frees removed documents and updates metrics",
    "control": "answers a control operation",
}

ELSEWHERE = "another process of the model failed here: ask again; its log has the details"
Failed = Callable[[str], object]
"""Called with a message for the client when a stage has failed."""
T = TypeVar("T")
_faults: dict[str, str] = {}  # stages that fail at their next run, and how


_alike: Callable[[Exception], bool] = lambda error: True  # noqa: E731 - set by `vote_by`


class InjectedFault(RuntimeError):
    """A test has made a stage fail."""


class RanksDivided(RuntimeError):
    """This rank has failed between collectives in which the others wait for it: the server must end."""


def vote_by(alike: Callable[[Exception], bool]) -> None:
    """Let ``alike`` say whether all ranks have failed at the same place (`FailureVote`)."""
    global _alike
    _alike = alike


@contextmanager
def together() -> Iterator[None]:
    """Run a block with collectives. Raises its error, or `RanksDivided` where not all ranks have met it."""
    try:
        yield
    except Exception as error:
        if isinstance(error, torch.AcceleratorError | RanksDivided) or _alike(error):
            raise
        raise RanksDivided("the other processes of the model did not fail with this one") from error


def run(stage: str, failed: Failed, function: Callable[..., T], *args: Any) -> T | None:
    """Call ``function`` and return its result. If it raises, log that, call ``failed`` and return None.

    Errors after which the device cannot be used any more are raised, and `RanksDivided`.
    """
    try:
        reach(stage)
        return function(*args)
    except Exception as error:
        if isinstance(error, torch.AcceleratorError | RanksDivided):
            raise
        log.exception("stage %r failed: it %s", stage, STAGES[stage])
        short = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if short:
            traceback.clear_frames(error.__traceback__)  # they hold tensors
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        failed(_message(stage, error, out_of_memory=short))
        return None


def run_alike(stage: str, failed: Failed, function: Callable[..., T], *args: Any) -> T | None:
    """`run`, where a failure of one rank alone would leave the ranks with different requests, and nothing
    votes on it later. Raises `RanksDivided` then, and the server ends."""

    def alike() -> T:
        with together():
            return function(*args)

    return run(stage, failed, alike)


def _message(stage: str, error: Exception, *, out_of_memory: bool) -> str:
    if out_of_memory:
        return (
            f"out of memory at stage {stage!r}, which {STAGES[stage]}: ask again, ask for less at "
            "once, or leave more memory free with a lower mem_fraction_static"
        )
    return (
        f"stage {stage!r} failed, which {STAGES[stage]} ({type(error).__name__}: {error}): ask "
        "again; the server's log has the details"
    )


def ending(reqs: Iterable[Any]) -> Failed:
    """Return what ends requests with an error, with the result of their forward pass at hand, or of the next.
    The KV that this pass writes is not cached.
    """

    def end(message: str) -> None:
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        for req in reqs:
            req.ragserve_private = True
            reason = FINISH_ABORT(
                f"ragserve: {message}", HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError"
            )
            if req.finished():  # and not reported yet
                req.finished_reason = reason
            elif req.to_finish is None:
                req.to_finish = reason

    return end


def nobody(message: str) -> None:
    """For stages whose failure takes nothing from a request."""


def reach(stage: str) -> None:
    """Fail here if a test has asked for that."""
    if _faults and (kind := _faults.pop(stage, None)) is not None:
        if kind == "memory":
            raise torch.OutOfMemoryError("injected")
        raise InjectedFault(f"injected at {stage!r}")


def inject(stage: str, kind: str = "") -> None:
    """Make a stage fail once. ``kind``: "memory" for a device without memory. Raises ValueError for an
    unknown stage, or where faults are not allowed.
    """
    if not os.environ.get(FAULTS_VARIABLE):
        raise ValueError(f"faults are off: set {FAULTS_VARIABLE}=1 to test with them")
    if stage not in STAGES:
        raise ValueError(f"no stage {stage!r}: one of {', '.join(STAGES)}")
    _faults[stage] = kind


def withdraw() -> list[str]:
    """Let no stage fail any more; return those that were not reached."""
    left = list(_faults)
    _faults.clear()
    return left
