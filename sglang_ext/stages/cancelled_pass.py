"""Lets a background composed prefill abort between layers when its request is cancelled.

A comparison in idle time is cancelled when a request arrives. SGLang reads messages between steps only, and a
composed context is computed within one step. So the pass of a marked request looks for its own abort before
each layer. Other messages that it reads are passed on to SGLang's loop at its next turn, in order.

Only where a single process runs the model: several would have to stop at the same layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

PULL = "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver._pull_raw_reqs"


class Cancelled(Exception):
    """All requests of the running pass have been cancelled."""


class Inbox:
    """Messages of the scheduler's loop, some of which are read before their turn. Scheduler thread only."""

    def __init__(self) -> None:
        self._pull: Callable[[], list[Any] | None] | None = None
        self._early: list[Any] = []

    def around_pull(self, original: Callable[..., list[Any] | None], receiver: Any) -> list[Any] | None:
        """Run around `SchedulerRequestReceiver._pull_raw_reqs`: give what was read early first."""
        self._pull = partial(original, receiver)
        pulled = original(receiver)
        if not self._early:
            return pulled
        early, self._early = self._early, []
        return early + (pulled or [])

    def cancelled(self, rids: Sequence[str]) -> bool:
        """Read new messages; tell whether they abort all requests ``rids``, as SGLang matches them."""
        from sglang.srt.managers.io_struct import AbortReq

        if self._pull is None:
            return False
        self._early += self._pull() or []
        aborts = [each for each in self._early if isinstance(each, AbortReq)]
        return all(any(each.abort_all or rid.startswith(each.rid) for each in aborts) for rid in rids)


inbox = Inbox()
_look: Callable[[], bool] | None = None  # of the pass that is running


def around_pull(original: Callable[..., Any], receiver: Any) -> Any:
    """See `Inbox.around_pull`."""
    return inbox.around_pull(original, receiver)


@contextmanager
def watched(reqs: Sequence[Any]) -> Iterator[None]:
    """Let `look` raise Cancelled in the block once all requests are cancelled, if all are background ones."""
    global _look
    if reqs and all(getattr(req, "ragserve_background", False) for req in reqs):
        _look = partial(inbox.cancelled, [req.rid for req in reqs])
    try:
        yield
    finally:
        _look = None


def look(device: torch.device) -> None:
    """Called before each layer of a pass. Waits for a GPU to finish its queued work: else all layers would be
    launched before a request can be cancelled. Raises Cancelled."""
    if _look is None:
        return
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    if _look():
        raise Cancelled("the request was cancelled while its context was computed")
