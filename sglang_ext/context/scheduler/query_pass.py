"""SamKV's query pass: the questions of all waiting requests, each over the system text and the initial and
local blocks of its documents.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch

from sglang_ext.context.compose.composer import Composer, filling_of
from sglang_ext.context.compose.request import ComposedContext
from sglang_ext.context.recompute.job import LastQueries
from sglang_ext.context.recompute.recompute_pass import recompute
from sglang_ext.tensors.buffers import Buffers, upload
from sglang_ext.wire.request_options import QuestionQuery

_BYTES = 2**30  # KV of one pass: 8,192 tokens of an 8B model in bfloat16 on one GPU


class QueryPass:
    """Runs the pass. Per rank.

    The KV that questions attend to, and their own, lie in free slots of the pool meanwhile, so that the
    recompute pass's graphs can run it; if the pool is full, in memory beside it. `batches` bounds that.
    """

    def __init__(self, model_runner: Any, composer: Composer, allocator: Any) -> None:
        self._runner = model_runner
        self._pool = model_runner.token_to_kv_pool
        self._composer = composer
        self._allocator = allocator
        self._device = torch.device(model_runner.device)
        token_bytes = 2 * self._pool.layer_num * self._pool.get_key_buffer(0)[0].nbytes
        self._tokens = max(1, _BYTES // token_bytes)

    def batches(self, contexts: Sequence[ComposedContext]) -> Iterator[list[ComposedContext]]:
        """Cut the requests, in their order, into passes whose KV takes at most 1 GiB, or one request each."""
        batch: list[ComposedContext] = []
        room = self._tokens
        for context in contexts:
            needed = len(context.partial.kept) + context.question_tokens
            if batch and needed > room:
                yield batch
                batch, room = [], self._tokens
            batch.append(context)
            room -= needed
        if batch:
            yield batch

    def __call__(self, contexts: Sequence[ComposedContext]) -> list[dict[QuestionQuery, torch.Tensor]]:
        """Return each question's query of its last token and, where the request wants it, its mean query: f32
        [layers, heads, head_dim], rotated for their positions.

        The contexts' sources must hold the tokens of their partial selections.
        """
        kept = [len(context.partial.kept) for context in contexts]
        lengths = [n + context.question_tokens for n, context in zip(kept, contexts, strict=True)]
        with self._room(sum(lengths)) as (slots, beside):
            rows = [row.split([n, len(row) - n]) for n, row in zip(kept, slots.split(lengths), strict=True)]
            fillings = [filling_of(context, own) for context, (own, _) in zip(contexts, rows, strict=True)]
            self._composer.gather(fillings, beside)
            jobs = [context.question_job(*row) for context, row in zip(contexts, rows, strict=True)]
            bounds = [0, *accumulate(len(job.ids) for job in jobs)]
            watch = QueryWatch(
                upload(np.array(bounds[1:], dtype=np.int64) - 1, self._device), self._means(contexts, bounds)
            )
            graphs = self._composer.graphs if beside is None and not watch.means_of else None
            if recompute(self._runner, jobs, graphs, watch, beside).by_graph and graphs is not None:
                watch.last = graphs.last
            # a copy: the next pass overwrites a graph's queries
            last = torch.stack([queries for queries, _ in watch.last.queries], dim=1).float()
        found: list[dict[QuestionQuery, torch.Tensor]] = [
            {"last": queries} for queries in last[: len(contexts)]
        ]
        for number, mean in watch.means.items():
            found[number]["mean"] = torch.stack(mean)
        return found

    @staticmethod
    def _means(contexts: Sequence[ComposedContext], bounds: Sequence[int]) -> dict[int, slice]:
        """Rows of the questions whose mean query is wanted, by number."""
        return {
            number: slice(*bound)
            for number, (context, bound) in enumerate(zip(contexts, pairwise(bounds), strict=True))
            if context.partial.samkv is not None
            and context.partial.samkv.experimental.question_query == "mean"
        }

    @contextmanager
    def _room(self, count: int) -> Iterator[tuple[torch.Tensor, Buffers | None]]:
        """Give slots, int64, for ``count`` tokens, and the buffers they belong to unless those are the
        pool's.

        They are free again at the end: what writes to them next is launched behind the pass on its stream.
        """
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


class QueryWatch:
    """Collects queries of a pass: each job's last one, and the mean over the rows in ``means_of``, by the
    job's number.
    """

    def __init__(self, last_rows: torch.Tensor, means_of: dict[int, slice]) -> None:
        self.last = LastQueries(last_rows)
        self.means_of = means_of
        self.means: dict[int, list[torch.Tensor]] = {number: [] for number in means_of}

    def __call__(self, layer: int, q: torch.Tensor, scaling: float, first: int | None = None) -> None:
        self.last(layer, q, scaling, first)
        before = first or 0
        for number, rows in self.means_of.items():
            own = q[max(rows.start - before, 0) : max(rows.stop - before, 0)].float()
            part, means = own.sum(0) / (rows.stop - rows.start), self.means[number]
            if layer == len(means):
                means.append(part)
            else:
                means[layer] += part
