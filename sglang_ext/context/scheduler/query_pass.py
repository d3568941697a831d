"""SamKV's query pass: the questions of all waiting requests, each over what its draft keeps: system text,
initial and local blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch

from sglang_ext.context.buffers import Buffers, upload
from sglang_ext.context.compose.composer import Composer, filling_of
from sglang_ext.context.compose.request import ComposedContext
from sglang_ext.context.recompute.job import LastQueries, RecomputeJob, question_job
from sglang_ext.context.recompute.recompute_pass import recompute
from sglang_ext.request_options import QuestionQuery


class QueryPass:
    """One rank's. The KV that questions look at, and their own, lie in free slots of the pool while the pass
    runs, so that the recompute pass' graphs can run it; where the pool is full, in memory beside it."""

    def __init__(self, model_runner: Any, composer: Composer, allocator: Any) -> None:
        self._runner = model_runner
        self._pool = model_runner.token_to_kv_pool
        self._composer = composer
        self._allocator = allocator
        self._device = torch.device(model_runner.device)

    def __call__(self, contexts: Sequence[ComposedContext]) -> list[dict[QuestionQuery, torch.Tensor]]:
        """Each question's mean query (where a draft asks for it) and that of its last token, f32 [layers,
        heads, head_dim], rotated for their places. The contexts' sources must hold the tokens of their
        drafts."""
        lengths = [len(context.draft.kept) + context.question_tokens for context in contexts]
        with self._room(sum(lengths)) as (slots, beside):
            rows = slots.split(lengths)
            self._composer.gather(
                [filling_of(c, row[: len(c.draft.kept)]) for c, row in zip(contexts, rows, strict=True)],
                beside,
            )
            jobs = [self._job(context, row) for context, row in zip(contexts, rows, strict=True)]
            bounds = [0, *accumulate(len(job.ids) for job in jobs)]
            seen = Queries(
                upload(np.array(bounds[1:], dtype=np.int64) - 1, self._device), self._means(contexts, bounds)
            )
            graphs = self._composer.graphs if beside is None and not seen.means_of else None
            if recompute(self._runner, jobs, graphs, seen, beside).by_graph and graphs is not None:
                seen.last = graphs.last
            last = torch.stack(
                [queries for queries, _ in seen.last.queries], dim=1
            ).float()  # a graph's are overwritten by the next pass
        found: list[dict[QuestionQuery, torch.Tensor]] = [
            {"last": queries} for queries in last[: len(contexts)]
        ]
        for number, mean in seen.means.items():
            found[number]["mean"] = torch.stack(mean)
        return found

    def _job(self, context: ComposedContext, row: torch.Tensor) -> RecomputeJob:
        start, kept = context.plan.question_start, len(context.draft.kept)
        return question_job(upload(context.question, self._device), start, row[:kept], row[kept:])

    @staticmethod
    def _means(contexts: Sequence[ComposedContext], bounds: Sequence[int]) -> dict[int, slice]:
        return {
            number: slice(*bound)
            for number, (context, bound) in enumerate(zip(contexts, pairwise(bounds), strict=True))
            if context.draft.samkv is not None and context.draft.samkv.experimental.question_query == "mean"
        }

    @contextmanager
    def _room(self, count: int) -> Iterator[tuple[torch.Tensor, Buffers | None]]:
        """Slots int64 for ``count`` tokens, and whose they are if not the pool's. Free again at the end: what
        writes to them next is launched behind the pass on its stream."""
        page = self._allocator.page_size
        slots = self._allocator.alloc(-(-count // page) * page)
        if slots is not None:
            try:
                yield slots[:count], None
            finally:
                self._allocator.free(slots)
            return
        first = self._pool.get_key_buffer(0)
        memory = torch.empty(
            (self._pool.layer_num, 2, count, *first.shape[1:]), dtype=first.dtype, device=self._device
        )
        yield (
            torch.arange(count, device=self._device),
            Buffers([layer[0] for layer in memory], [layer[1] for layer in memory]),
        )


class Queries:
    """What a pass shows of its queries: the last of each job, and the mean of those rows that ``means_of``
    names by the job's number.
    """

    def __init__(self, last_rows: torch.Tensor, means_of: dict[int, slice]) -> None:
        self.last = LastQueries(last_rows)
        self.means_of = means_of
        self.means: dict[int, list[torch.Tensor]] = {number: [] for number in means_of}

    def __call__(self, layer: int, q: torch.Tensor, scaling: float) -> None:
        self.last(layer, q, scaling)
        for number, rows in self.means_of.items():
            self.means[number].append(q[rows].float().mean(0))
