"""Bulk ingestion on Ray Data: a cluster's actors parse and embed, and this process writes.

    planned files -> ParseStage actors -> EmbedStage actors -> this process: transactions, items of the job

All writing is done here, by the process that has the job's lease, so files fail alone and an interrupted job
is resumed as ever. Nodes open the files themselves, at the same paths."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ragserve.children import ENDING
from ragserve.errors import Unavailable
from ragserve.ingest.jobs.job_report import Interrupted
from ragserve.ingest.jobs.lease import JobRun
from ragserve.ingest.pipeline import (
    Commit,
    EmbeddedChunks,
    Ready,
    ResultQueue,
    WritingPipeline,
)
from ragserve.ingest.planned import PlannedFile
from ragserve.ingest.ray_stages import COLUMN, EmbeddedFile, EmbedStage, ParseStage, rows
from ragserve_index.types import JobItem, NewDocument

LOCAL = "local"
_FILES = 16  # of a batch
_CPUS_PER_PARSER = 8  # embedding a file takes about ten times as long as parsing it
_PARSER_CPUS = 0.1  # that a parser asks of Ray: it waits most of the time, and every CPU is to embed


class RayPipeline(WritingPipeline):
    """A run on a cluster.

    Args:
        address: Of the cluster, as `ray.init` takes it; ``local`` starts one on this machine.
        parser: Options of `ParseProcess`.
        embedder: Options of `Embedder`.
        sentence_bytes: Bytes a token to store for embedded sentences; 0: embed none.
    """

    def __init__(
        self,
        run: JobRun,
        *,
        address: str,
        parser: Mapping[str, Any],
        embedder: Mapping[str, Any],
        commit: Commit,
        record: Callable[[Sequence[JobItem]], None],
        relabel: Callable[[PlannedFile], None],
        sentence_bytes: int = 0,
    ) -> None:
        super().__init__(run, commit=commit, record=record, relabel=relabel)
        self._address = address
        self._parser_options = parser
        self._embedder_options = embedder
        self._sentence_bytes = sentence_bytes
        self._ray: Any = None

    def run(self, files: Iterable[PlannedFile]) -> None:
        """Connect, and take each file to its outcome. Raises ``Unavailable`` without Ray, or its cluster."""
        with connected(self._address) as self._ray:
            super().run(files)

    def _produce(self, files: Iterable[PlannedFile], queue: ResultQueue) -> None:
        planned = []
        for file in files:
            if queue.closed:
                return
            planned.append(file)
        if not planned:
            return
        for batch in self._dataset(planned).iter_batches(batch_size=None, batch_format="numpy"):
            for row in batch[COLUMN]:
                queue.put(pickle.loads(row))
            if queue.closed:
                return

    def _dataset(self, planned: list[PlannedFile]) -> Any:
        from ray import data

        resources = self._ray.cluster_resources()
        cpus, gpus = int(resources.get("CPU", 1)), int(resources.get("GPU", 0))
        on_gpus = gpus if self._embedder_options["device"] != "cpu" else 0
        parsers = max(1, cpus // _CPUS_PER_PARSER)
        embedders = on_gpus or cpus
        context = data.DataContext.get_current()
        context.enable_progress_bars = False
        blocks = -(-len(planned) // _FILES)
        source = data.from_items([{COLUMN: row} for row in rows(planned)[COLUMN]], override_num_blocks=blocks)
        parsed = source.map_batches(
            ParseStage,
            fn_constructor_args=(dict(self._parser_options),),
            batch_size=_FILES,
            compute=data.ActorPoolStrategy(size=min(parsers, blocks)),
            num_cpus=_PARSER_CPUS,
        )
        return parsed.map_batches(
            EmbedStage,
            fn_constructor_args=(dict(self._embedder_options), self._sentence_bytes),
            batch_size=_FILES,
            compute=data.ActorPoolStrategy(size=min(embedders, blocks)),
            **({"num_gpus": 1} if on_gpus else {"num_cpus": 1 - _PARSER_CPUS}),
        )

    def _interrupt(self) -> None:
        self._ray.shutdown()  # ends the actors; the thread that waits for them gets an error

    def _embedded(self, documents: Sequence[NewDocument], ready: Sequence[Ready]) -> Sequence[EmbeddedChunks]:
        if self._run.should_stop():
            raise Interrupted
        return [(file.chunks, file.vectors) for _, file in ready if isinstance(file, EmbeddedFile)]


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """Connect to a cluster, or start a local one, and disconnect. Raises ``Unavailable``."""
    # before the import, which reads them; nothing is reported to Ray's makers unless the user wants it
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # else an interrupted run would start another cluster
    try:
        import ray
        from ray import data
    except ImportError as error:
        raise Unavailable(
            "--ray needs the package ray, which is not installed.",
            hint="pip install 'ragserve[ray]', here and on every node.",
            code="no_ray",
        ) from error
    logging.getLogger(data.__name__).setLevel(logging.ERROR)
    main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in ENDING} if main else {}
    options = {"include_dashboard": False} if address == LOCAL else {}
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise Unavailable(
            f"The Ray cluster {address!r} cannot be reached: {error}.",
            hint="Start one with `ray start --head`, or use --ray local.",
            code="ray_unreachable",
        ) from error
    try:
        for number, handler in handlers.items():
            signal.signal(number, handler)  # Ray puts its own in their place
        yield ray
    finally:
        ray.shutdown()
