"""Counts JIT compilations and cache loads of kernels. After warm-up there should be none: each one stalls a
request."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_KEPT = 64  # the latest of them, with their names
_LONGEST = 600  # characters of a description
_NOTICED_S = 0.05  # less is counted and not logged: a kernel that an earlier start compiled is loaded in it
log = logging.getLogger(__name__)


@dataclass(slots=True)
class Compilations:
    """Counts those of Triton and of ``torch.compile``.

    Attributes:
        count: so far.
        seconds: that they took, together.
        serving: whether the warm-up is over: what takes long then is logged.
        latest: number, description and seconds of the latest ones.
    """

    count: int = 0
    seconds: float = 0.0
    serving: bool = False
    latest: deque[tuple[int, str, float]] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _begun: list[float] = field(default_factory=list)

    def watch(self) -> None:
        """Be told of compilations from now on. Whoever was told before still is."""
        import torch._dynamo.callback as dynamo
        from triton import knobs

        runtime = knobs.runtime
        runtime.jit_cache_hook = _after(runtime.jit_cache_hook, self._begin)
        runtime.jit_post_compile_hook = _after(runtime.jit_post_compile_hook, self._end)
        dynamo.on_compile_start(lambda args: self.begin())
        dynamo.on_compile_end(lambda args: self.end(f"torch.compile {args.compile_id}"))

    def begin(self) -> None:
        """A compilation begins, perhaps within another."""
        self._begun.append(time.perf_counter())

    def end(self, what: str) -> None:
        """The compilation that began last has ended."""
        seconds = time.perf_counter() - self._begun.pop() if self._begun else 0.0
        self.count += 1
        if not self._begun:  # else it is a part of another's time
            self.seconds += seconds
        what = what[:_LONGEST]
        self.latest.append((self.count, what, round(seconds, 3)))
        if self.serving and seconds >= _NOTICED_S:
            log.warning("a request waited %.2f s while a kernel was compiled or loaded: %s", seconds, what)

    def since(self, count: int) -> list[dict[str, Any]]:
        """Return what came after the first ``count``: ``what`` and ``seconds``, of the latest 64 at most."""
        return [{"what": what, "seconds": took} for number, what, took in self.latest if number > count]

    def _begin(self, **event: Any) -> None:
        self.begin()

    def _end(self, **event: Any) -> None:
        constants = event["compile"].get("constants", {})
        given = ", ".join(f"{name}={value}" for name, value in constants.items())
        self.end(f"{event['fn'].module}.{event['repr']} {given}")


def _after(first: Callable[..., Any] | None, then: Callable[..., None]) -> Callable[..., Any]:
    """Return a hook of Triton's that asks ``first`` what it would answer."""

    def hook(**event: Any) -> Any:
        answer = None if first is None else first(**event)
        if not answer:  # True: the launch does not compile
            then(**event)
        return answer

    return hook


compilations = Compilations()
