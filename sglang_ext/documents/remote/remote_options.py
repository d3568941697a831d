"""Options of the shared stores (`kv_storage_args`). Imports neither torch nor SGLang."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_FOLDER_BYTES = 64 * 2**30
_DEFAULTS: dict[str, Any] = {
    "master_server_address": None,
    "local_hostname": "",
    "metadata_server": "P2PHANDSHAKE",
    "protocol": "tcp",
    "device_name": "",
    "global_segment_size": 2**30,
    "local_buffer_size": 64 * 2**20,
}


def mooncake_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Complete and check ``kv_storage_args``, named as SGLang names them.

    ``master_server_address``: HOST:PORT of `mooncake_master`. ``global_segment_size``: bytes of memory that
    this engine gives to the store (1 GiB); 0 where others do. ``local_hostname``: the address under which
    other engines reach this machine; by default the one from which it reaches the master. Raises
    ValueError."""
    if unknown := sorted(set(given) - set(_DEFAULTS)):
        raise ValueError(f"mooncake has no option {unknown[0]!r}: one of {', '.join(_DEFAULTS)}")
    options = _DEFAULTS | dict(given)
    host, colon, port = str(options["master_server_address"] or "").rpartition(":")
    if not (host and colon and port.isdigit()):
        raise ValueError("mooncake needs master_server_address, as HOST:PORT")
    for name in ("global_segment_size", "local_buffer_size"):
        if not isinstance(options[name], int) or options[name] < 0:
            raise ValueError(f"mooncake: {name} is a number of bytes, not {options[name]!r}")
    return options


def folder_options(given: Mapping[str, Any]) -> tuple[Path, int]:
    """Return ``folder``, and ``bytes`` (64 GiB), the limit of all engines and models together. Raises
    ValueError."""
    if unknown := sorted(set(given) - {"folder", "bytes"}):
        raise ValueError(f"a shared folder has no option {unknown[0]!r}: one of folder, bytes")
    if not given.get("folder"):
        raise ValueError("a shared store needs folder, a folder inside a mount that all engines have")
    limit = given.get("bytes", _FOLDER_BYTES)
    if not isinstance(limit, int) or limit < 0:
        raise ValueError(f"shared: bytes is a number of bytes, not {limit!r}")
    return Path(str(given["folder"])), limit
