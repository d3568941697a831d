"""How much of the link from host memory the loads of offloaded requests take, measured while they run."""

from __future__ import annotations

LEAST_BYTES = 2**20  # of loads that tell the link's rate: smaller ones wait more than they move
WEIGHT = 0.25  # of the latest window in a mean


class LinkMeter:
    """Means over windows of decode steps: bytes loaded a step, seconds a step, bytes a second of loads.

    On a CPU loads take their time from the steps, there is no link beside them, and no rate is measured."""

    def __init__(self) -> None:
        self.given = 0.0  # bytes a second, instead of the measured rate; 0: none
        self.rate = self.step_bytes = self.step_seconds = 0.0  # 0: not measured yet
        self._loaded = self._timed = self._steps = 0  # of the window at hand, like those below
        self._loading = self._stepping = 0.0
        self._latest: float | None = None

    def loaded(self, size: int, late: int, seconds: float | None) -> None:
        """Count a load of ``size`` bytes, of which all but ``late`` took ``seconds``; None: not measured."""
        self._loaded += size
        if seconds is not None and size - late >= LEAST_BYTES:
            self._timed += size - late
            self._loading += seconds

    def step(self, now: float) -> None:
        """Count a decode step of offloaded requests that is launched at ``now``, in seconds."""
        if self._latest is not None:
            self._steps += 1
            self._stepping += now - self._latest
        self._latest = now

    def pause(self) -> None:
        """The next step does not follow the one before: the time between them is no step's."""
        self._latest = None

    def settle(self) -> None:
        """Take the window at hand into the means, and begin another one."""
        if self._steps:
            self.step_bytes = _mean(self.step_bytes, self._loaded / self._steps)
            self.step_seconds = _mean(self.step_seconds, self._stepping / self._steps)
            self._loaded = self._steps = 0
            self._stepping = 0.0
        if self._loading > 0:
            self.rate = _mean(self.rate, self._timed / self._loading)
            self._timed, self._loading = 0, 0.0

    @property
    def share(self) -> float:
        """Bytes loaded a step, by those that the link moves in a step's time; 0 where that is not known."""
        moved = (self.given or self.rate) * self.step_seconds
        return self.step_bytes / moved if moved else 0.0


def _mean(before: float, latest: float) -> float:
    return before + WEIGHT * (latest - before) if before else latest
