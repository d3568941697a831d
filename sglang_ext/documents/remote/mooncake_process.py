"""The process that has Mooncake's client: `python -m sglang_ext.documents.remote.mooncake_process`.

Mooncake's client holds Python's lock while it connects, for as long as its master is away, and a fault in it
ends its process: neither may happen to a scheduler. This process answers one request at a time over a socket,
and takes pages from and puts them into memory that it shares with the scheduler. It ends with the scheduler.

Imports neither torch nor SGLang."""

from __future__ import annotations

import ctypes
import glob
import json
import mmap
import os
import socket
import sys
from multiprocessing.connection import Connection
from typing import Any

CONNECT_S = 0.5
AWAY = -1000  # beside Mooncake's own codes
_LIBRARIES = ("libnl-3.so.200", "libnl-route-3.so.200", "libibverbs.so.1")  # in order of dependence


def load_libraries() -> None:
    """Load the system library that Mooncake's wheel needs, from the system or from this environment. Raises
    OSError where it is in neither."""
    try:
        ctypes.CDLL(_LIBRARIES[-1], mode=ctypes.RTLD_GLOBAL)
        return
    except OSError:
        places = glob.glob(os.path.join(sys.prefix, "lib", "ibverbs", "**"), recursive=True)
        found = {os.path.basename(place): place for place in places}
        if _LIBRARIES[-1] not in found:
            raise
    for name in _LIBRARIES:
        if name in found:
            ctypes.CDLL(found[name], mode=ctypes.RTLD_GLOBAL)


class _Client:
    """Mooncake's client over shared memory, connected when the master answers for the first time."""

    def __init__(self, options: dict[str, Any], descriptor: int, size: int) -> None:
        load_libraries()
        from mooncake.store import MooncakeDistributedStore

        self._make = MooncakeDistributedStore
        self._options = options
        self._memory = mmap.mmap(descriptor, size)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._size = size
        self._store: Any = None

    def check(self) -> int:
        """0 if the master answers."""
        if not self._reached():
            return AWAY
        return min(0, int(self._store.is_exist("ragserve/check")))

    def get(self, name: str) -> tuple[int, bytes]:
        """(1, value), (0, nothing) where there is none, or an error's code."""
        if not self._reached():
            return AWAY, b""
        there = int(self._store.is_exist(name))
        if there != 1:
            return there, b""
        data = bytes(self._store.get(name))
        return (1, data) if data else (int(self._store.is_exist(name)) and AWAY, b"")

    def put(self, name: str, data: bytes) -> int:
        """Store a value, in place of another."""
        return int(self._store.upsert(name, data)) if self._reached() else AWAY

    def get_pages(self, names: list[str], size: int) -> list[int]:
        """Fill the shared memory with values of ``size`` bytes, one behind the other."""
        if not self._reached():
            return [AWAY] * len(names)
        return list(self._store.batch_get_into(names, self._places(names, size), [size] * len(names)))

    def put_pages(self, names: list[str], size: int) -> list[int]:
        """Store the values in the shared memory."""
        if not self._reached():
            return [AWAY] * len(names)
        return list(self._store.batch_upsert_from(names, self._places(names, size), [size] * len(names)))

    def remove(self, names: list[str]) -> list[int]:
        """Delete these, also while a read elsewhere leases them: its pages then fail their CRCs."""
        return list(self._store.batch_remove(names, True)) if self._reached() else [AWAY]

    def remove_matching(self, pattern: str) -> int:
        """Delete what matches."""
        return int(self._store.remove_by_regex(pattern, True)) if self._reached() else AWAY

    def close(self) -> None:
        """Leave the store."""
        if self._store is not None:
            self._store.close()

    def _places(self, names: list[str], size: int) -> list[int]:
        return [self._address + i * size for i in range(len(names))]

    def _reached(self) -> bool:
        """Connect if that has not been done. Afterwards the client reconnects by itself."""
        if self._store is not None:
            return True
        host, _, port = self._options["master_server_address"].rpartition(":")
        try:
            with socket.create_connection((host, int(port)), timeout=CONNECT_S) as probe:
                own = probe.getsockname()[0]
        except OSError:
            return False
        store = self._make()
        code = store.setup(
            self._options["local_hostname"] or own,
            self._options["metadata_server"],
            self._options["global_segment_size"],
            self._options["local_buffer_size"],
            self._options["protocol"],
            self._options["device_name"],
            self._options["master_server_address"],
        )
        if code or store.register_buffer(self._address, self._size):
            store.close()
            return False
        self._store = store
        return True


def main() -> None:
    """Serve the scheduler on inherited descriptors until it closes its end."""
    link, memory, size = map(int, sys.argv[1:4])
    connection = Connection(link)
    try:
        client = _Client(json.loads(sys.argv[4]), memory, size)
    except (ImportError, OSError) as error:
        connection.send((0, f"{type(error).__name__}: {error}"))
        return
    connection.send((0, ""))
    while True:
        try:
            number, operation, arguments = connection.recv()
        except EOFError:
            break
        connection.send((number, getattr(client, operation)(*arguments)))
    client.close()


if __name__ == "__main__":
    main()
