"""The recompute pass as CUDA graphs: a pass over few rows takes longer to launch layer by layer than to
compute.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ragserve_kernels import dispatch as kernels
from ragserve_kernels.kv import HEAD_DIMS
from sglang_ext.context.recompute.job import LastQueries, RecomputeJob
from sglang_ext.context.recompute.layers import run_layers
from sglang_ext.context.recompute.row_attention import Rows
from sglang_ext.ranks.ranks import Ranks
from sglang_ext.tensors.buffers import PADDING_SLOT, upload
from sglang_ext.versions import settings_of

log = logging.getLogger(__name__)
# Rows; beyond them an 8B model computes longer than it takes to launch, on slow CPUs, too: with one H100 811
# rows took 34 ms without a graph, where an H200 on a faster CPU took 21.
SIZES = (16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
SHARED = tuple(range(1280, 2049, 256))  # more, where several GPUs share a pass: each computes less
REQUESTS = 4  # most requests in one pass of these graphs: a launch splits the keys for as many
# Where more wait, others of their own, with the numbers of rows that so many questions have. Beyond the last
# of them the layers compute for as long as they launch.
MANY_REQUESTS, MANY_SIZES = 16, (128, 192, 256, 384, 512, 768, 1024)
MOST_REQUESTS, MOST_SIZES = 32, (256, 384, 512, 768, 1024)


class StaticRows:
    """Inputs of a pass at fixed addresses: at most ``max_rows`` rows of ``MOST_REQUESTS`` jobs over
    ``max_slots`` slots.

    Rows behind the last job's are padding: token 0 at position 0, which attends to nothing and writes to the
    padding slot.
    """

    def __init__(self, max_rows: int, max_slots: int, device: torch.device) -> None:
        def zeros(n: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(n, dtype=dtype, device=device)

        self._device = device
        self._max_rows = max_rows
        self.ids, self.positions = zeros(max_rows, torch.int64), zeros(max_rows, torch.int64)
        self._seen, self._targets = zeros(max_rows, torch.int32), zeros(max_rows, torch.int64)
        self._slots = zeros(max_slots, torch.int64)
        self._of_jobs = zeros(3 * MOST_REQUESTS + 1, torch.int32)  # written by one copy
        # each job's last row; 0 where there is none
        self.last, self._slot_start, self._row_start = self._of_jobs.split(
            [MOST_REQUESTS, MOST_REQUESTS, MOST_REQUESTS + 1]
        )

    def fits(self, jobs: Sequence[RecomputeJob]) -> bool:
        """True if the jobs are few and small enough and uniform."""
        return (
            len(jobs) <= MOST_REQUESTS
            and all(job.uniform for job in jobs)
            and sum(len(job.positions) for job in jobs) <= self._max_rows
            and sum(len(job.slots) for job in jobs) <= len(self._slots)
        )

    def load(self, jobs: Sequence[RecomputeJob], size: int) -> None:
        """Load jobs that fit, with at most ``size`` rows, and pad them to ``size``."""
        for target, parts, padding in (
            (self.ids, [job.ids for job in jobs], 0),
            (self.positions, [job.positions for job in jobs], 0),
            (self._seen, [job.seen[0] for job in jobs], 0),
            (self._targets, [job.targets[0] for job in jobs], PADDING_SLOT),
        ):
            joined = parts[0] if len(parts) == 1 else torch.cat(parts)
            target[: len(joined)].copy_(joined)
            target[len(joined) : size].fill_(padding)
        slots = torch.cat([job.slots for job in jobs])
        self._slots[: len(slots)].copy_(slots)
        last, slot_start, row_start = np.split(
            of_jobs := np.zeros(len(self._of_jobs), dtype=np.int32), (MOST_REQUESTS, 2 * MOST_REQUESTS)
        )
        ends = np.cumsum([len(job.ids) for job in jobs])
        last[: len(jobs)] = ends - 1  # others may have been written by an earlier, larger pass
        slot_start[1 : len(jobs)] = np.cumsum([len(job.slots) for job in jobs])[:-1]
        row_start[1 : len(jobs) + 1] = ends
        row_start[len(jobs) + 1 :] = ends[-1]  # absent jobs have no rows
        self._of_jobs.copy_(upload(of_jobs, self._device), non_blocking=True)

    def rows(self, size: int, requests: int = MOST_REQUESTS) -> Rows:
        """The first ``size`` rows, of at most ``requests`` jobs, in the form that a layer of the pass
        takes.
        """
        return Rows(
            slots=self._slots,
            slot_start=self._slot_start[:requests],
            row_start=self._row_start[: requests + 1],
            seen=self._seen[None, :size],
            targets=self._targets[None, :size],
            alone=None,
            slot_counts=(len(self._slots),),
            row_counts=(size,),
            padded=True,
        )


class RecomputeGraphs:
    """The graphs, one per number of rows for few requests, many and most, captured when the scheduler
    starts, the largest first.

    Collectives are captured as SGLang captures those of its decode graphs. All ranks capture the same graphs
    in the same order, and replay the same one: what chooses it does not differ between them.
    """

    def __init__(self, model_runner: Any, sizes: Sequence[int]) -> None:
        """``sizes``: numbers of rows, ascending."""
        from sglang.srt.distributed.parallel_state import graph_capture

        self._pool = model_runner.token_to_kv_pool
        keys = self._pool.get_key_buffer(0)
        self._sizes = tuple(sizes)
        self._static = StaticRows(self._sizes[-1], len(keys), keys.device)
        shared = self._sizes[len(SIZES) :]
        self._kinds = {  # numbers of rows by most requests
            REQUESTS: self._sizes,
            MANY_REQUESTS: MANY_SIZES + shared,
            MOST_REQUESTS: MOST_SIZES + shared,
        }
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}  # by rows and most requests
        self.last = LastQueries(self._static.last)
        self._hidden = torch.empty(0)  # [max rows, hidden size], of the latest pass
        pool = torch.cuda.graph_pool_handle()
        static = self._static
        with torch.no_grad(), graph_capture() as capture:
            kinds = sorted(((size, most) for most in self._kinds for size in self._kinds[most]), reverse=True)
            for size, most in kinds:
                ids, positions, rows = static.ids[:size], static.positions[:size], static.rows(size, most)
                for _ in range(2):  # compiles kernels and lets libraries choose theirs
                    hidden = run_layers(model_runner, rows, ids, positions, self.last)
                if not len(self._hidden):
                    self._hidden = torch.empty_like(hidden)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(
                    graph, pool=pool, stream=capture.stream, capture_error_mode="thread_local"
                ):
                    self._hidden[:size].copy_(run_layers(model_runner, rows, ids, positions, self.last))
                self._graphs[size, most] = graph
        torch.cuda.synchronize()

    def __len__(self) -> int:
        return len(self._graphs)

    def fits(self, jobs: Sequence[RecomputeJob]) -> bool:
        """True if a graph runs these jobs."""
        return self._static.fits(jobs)

    def replay(self, jobs: Sequence[RecomputeJob]) -> torch.Tensor | None:
        """Run the jobs on the current stream. Returns None, with nothing done, if no graph fits them; else
        the hidden states after the model's last norm, [rows, hidden size], which the next pass overwrites.
        """
        if not self.fits(jobs):
            return None
        count = sum(len(job.positions) for job in jobs)
        most = next(most for most in self._kinds if most >= len(jobs))
        size = next(size for size in self._kinds[most] if size >= count)
        self._static.load(jobs, size)
        # a graph does not ask the pool layer by layer: wait for everything that still comes from host
        self._pool.get_key_buffer(self._pool.layer_num - 1)
        self._graphs[size, most].replay()
        return self._hidden[:count]


def capture_graphs(model_runner: Any, ranks: Ranks) -> RecomputeGraphs | None:
    """Capture the graphs if the pass runs through our kernel and SGLang itself uses CUDA graphs; else return
    None. Logs a warning and captures fewer, or returns None, if capturing fails, on every rank if it fails on
    one.
    """
    keys = model_runner.token_to_kv_pool.get_key_buffer(0)
    if (
        not keys.is_cuda
        or not kernels.use_triton(keys)
        or keys.shape[-1] not in HEAD_DIMS
        or keys.dtype != model_runner.dtype
    ):
        return None
    if settings_of(model_runner.server_args).cuda_graph_config.decode.backend == "disabled":
        return None
    for sizes in (SIZES,) if ranks.alone else (SIZES + SHARED, SIZES):
        graphs = None
        try:
            graphs = RecomputeGraphs(model_runner, sizes)
        except RuntimeError as error:  # device errors of torch, out of memory among them
            log.warning("no CUDA graphs recompute up to %d tokens: %s", sizes[-1], error)
        if ranks.all_agree(graphs is not None):
            return graphs
    log.warning("tokens will be recomputed without CUDA graphs, which takes longer to launch")
    return None
