"""The background saver: a side stream, pinned staging buffers and CPU threads."""

from __future__ import annotations

import queue
import threading
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from ragserve_kernels.scatter_d2h.naive import scatter


class Saver:
    """Saves tensors of a GPU to host blocks behind the computation.

    ``submit`` orders one contiguous copy into a pinned staging buffer after the current stream's work, on a
    stream of its own; when it has landed, CPU threads spread it over the host blocks. It waits only when all
    staging buffers are in use. Threads may share one saver. A tensor given to it may be freed at once, but
    not written to before ``wait`` has returned."""

    def __init__(
        self,
        *,
        device: torch.device | str = "cuda",
        staging_bytes: int = 64 << 20,
        buffers: int = 2,
        threads: int = 4,
    ) -> None:
        if staging_bytes < 1 or buffers < 1 or threads < 1:
            raise ValueError("staging_bytes, buffers and threads must be at least 1.")
        self._device = torch.device(device)
        self._stream = torch.cuda.Stream(self._device)
        self._staging: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        for _ in range(buffers):
            self._staging.put(torch.empty(staging_bytes, dtype=torch.uint8, pin_memory=True))
        self.staging_bytes = staging_bytes
        # one worker in order; its copies use torch's own threads, without the interpreter lock and without a
        # Python thread for each
        self._worker = ThreadPoolExecutor(
            1, "kv-save", initializer=torch.set_num_threads, initargs=(threads,)
        )
        self._pending: list[Future[None]] = []
        self._lock = threading.Lock()

    def submit(self, src: torch.Tensor, host: torch.Tensor, index: torch.Tensor) -> None:
        """Save ``src``; arguments as for :func:`ragserve_kernels.scatter_d2h.scatter_d2h`, which checks them.

        Raises:
            ValueError: ``src`` is larger than a staging buffer.
        """
        if src.nbytes > self.staging_bytes:
            raise ValueError(
                f"src has {src.nbytes} bytes; a staging buffer has {self.staging_bytes}. Save fewer tokens "
                "at a time."
            )
        buffer = self._staging.get()
        rows = buffer[: src.nbytes].view(src.dtype).view(src.shape)
        copied = torch.cuda.Event()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            rows.copy_(src, non_blocking=True)
            copied.record()
        src.record_stream(self._stream)  # its memory is not handed out again before the copy is done
        save = self._worker.submit(self._finish, copied, buffer, rows, host, index)
        with self._lock:  # what is done is forgotten, what failed is kept for wait()
            self._pending = [
                each for each in self._pending if not each.done() or each.exception() is not None
            ]
            self._pending.append(save)

    def _finish(
        self,
        copied: torch.cuda.Event,
        buffer: torch.Tensor,
        rows: torch.Tensor,
        host: torch.Tensor,
        index: torch.Tensor,
    ) -> None:
        try:
            copied.synchronize()
            scatter(rows, host, index)
        finally:
            self._staging.put(buffer)

    def wait(self) -> None:
        """Return when everything submitted before is in its host blocks; raises what a thread raised."""
        with self._lock:
            pending, self._pending = self._pending, []
        futures.wait(pending)
        for save in pending:
            save.result()

    def close(self) -> None:
        """Wait, and end the worker."""
        try:
            self.wait()
        finally:
            self._worker.shutdown()

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()
