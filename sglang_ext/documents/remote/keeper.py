"""A thread that deletes in the shared store, and notices when the store goes and comes back."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from sglang_ext.documents.disk.disk import Faults
from sglang_ext.documents.pages.metrics import remote_metrics
from sglang_ext.documents.remote.deletions import Deletion, Deletions
from sglang_ext.documents.remote.remote_backend import RemoteBackend, StoreAway

log = logging.getLogger(__name__)
_CALM = 5  # times as long between two looks when all is well
_BATCH = 256  # documents deleted by one call


class Keeper:
    """Looks after a store. ``away`` is True until the store has answered for the first time."""

    def __init__(
        self,
        backend: RemoteBackend,
        deletions: Deletions,
        lock: Any,
        is_busy: Callable[[Deletion], bool],
        faults: Faults,
        retry_s: float,
    ) -> None:
        """``is_busy`` tells, under ``lock``, whether something of a deletion is still being written."""
        self.away = True
        self._backend = backend
        self._deletions = deletions
        self._lock = lock
        self._is_busy = is_busy
        self._faults = faults
        self._metrics = remote_metrics()
        self._retry_s = retry_s
        self._said = False
        self._closing = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ragserve-remote-keeper", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Look for work at once."""
        self._wake.set()

    def went(self, error: StoreAway) -> None:
        """Note that the store did not answer. Any thread."""
        self._faults.count("remote_away")
        if not self.away or not self._said:
            log.warning(
                "the shared store of documents' KV is away (%s): requests go on without it, and it is asked "
                "again every %g s",
                error,
                self._retry_s,
            )
        self.away = self._said = True
        self._show()

    def close(self) -> None:
        """Stop. Deletions that are not confirmed are in the journal."""
        self._closing = True
        self._wake.set()
        self._thread.join(timeout=10)

    def _run(self) -> None:
        while True:
            try:
                self._save()
                self._reach()
                self._delete()
            except StoreAway as error:
                self.went(error)
            except Exception as error:  # whatever it is, deletions that follow must be carried out
                log.exception("looking after the shared store failed, will retry")
                self._faults("remote", f"looking after the shared store: {error!r}")
            self._show()
            if self._closing:
                return
            self._wake.wait(self._retry_s if self.away or len(self._deletions) else _CALM * self._retry_s)
            self._wake.clear()

    def _save(self) -> None:
        """Make the journal say what is left."""
        with self._lock:
            if not self._deletions.changed:
                return
            write = self._deletions.writer()
        try:
            write()
        except OSError as error:
            self._faults("remote", f"writing the journal of deletions: {error}")

    def _reach(self) -> None:
        was_away = self.away
        self._backend.check()
        if was_away:  # one that went since may have gone after it was looked at
            if self._said:
                log.info("the shared store of documents' KV answers again")
            self.away = self._said = False

    def _delete(self) -> None:
        with self._lock:
            left = {each: n for each, n in self._deletions.left().items() if not self._is_busy(each)}
        spaces: dict[str, list[Deletion]] = {}
        for each in left:
            if each.namespace is None:
                self._carry_out([each], left, self._backend.clear)
            elif each.key is None:
                self._carry_out([each], left, partial(self._backend.remove_namespace, each.namespace))
            else:
                spaces.setdefault(each.namespace, []).append(each)
        for space, own in spaces.items():
            for at in range(0, len(own), _BATCH):
                batch = own[at : at + _BATCH]
                keys = [str(each.key) for each in batch]
                self._carry_out(batch, left, partial(self._backend.remove, keys, space))
        if left:
            self._save()

    def _carry_out(
        self, batch: list[Deletion], left: dict[Deletion, int], delete: Callable[[], None]
    ) -> None:
        delete()
        with self._lock:
            for each in batch:
                self._deletions.confirm(each, left[each])

    def _show(self) -> None:
        self._metrics.up.set(not self.away)
        self._metrics.unconfirmed.set(len(self._deletions))
