"""Refuses to change the weights of a running server that keeps documents' KV.

Everything kept of a document (its KV on each tier, its analysis, the retrieval heads, the gate's record) is
found by the fingerprint of the weights that the server started with. KV of other weights under it would
answer after the next restart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
ENTRIES = tuple(  # joining the trainer's group is refused as well, before the trainer waits for this server
    f"{UPDATER}.{name}"
    for name in (
        "update_weights_from_disk",
        "update_weights_from_distributed",
        "update_weights_from_ipc",
        "update_weights_from_tensor",
        "init_weights_update_group",
        "check_weights",
    )
)
_READS = ("snapshot", "compare", "checksum")  # actions of check_weights; its other one resets the weights
_MESSAGE = (
    "ragserve: documents' KV and the measurements of strategies belong to the weights that this server "
    "started with, so they cannot be changed while it runs: restart it with the new model"
)


def guarded(original: Callable[..., Any], updater: Any, recv_req: Any, *, composes: bool) -> Any:
    """Run ``original``, or answer with an error, on every rank alike, in a server that composes contexts."""
    if not composes or getattr(recv_req, "action", None) in _READS:
        return original(updater, recv_req)
    from sglang.srt.managers import io_struct

    output = getattr(io_struct, type(recv_req).__name__.removesuffix("Input") + "Output")
    return output(success=False, message=_MESSAGE)
