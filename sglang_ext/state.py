"""The objects of this scheduler process that the hooks reach. Scheduler thread only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class ProcessState:
    """``runtime``: set by the cache factory; None in a process whose cache is not ours. ``attention``: sparse
    decoding, None where it is off. ``streaming``: streaming heads in a pool of their own, which excludes
    ``attention``. ``batch``: the batch whose forward pass is running. ``sampled``: the requests that are
    sampled for. ``prefill_kernels``: set where they are not SGLang's choice. ``chunk_attention``: of prompts
    that are prefilled layer by layer; None where the kernel for rows attends.
    """

    runtime: Any = None
    attention: Any = None
    streaming: Any = None
    batch: Any = None
    sampled: Sequence[Any] = ()
    prefill_kernels: str | None = None
    chunk_attention: Any = None

    @property
    def composition(self) -> Any:
        """Composed contexts; None where there are none."""
        return None if self.runtime is None else self.runtime.composition


current = ProcessState()
