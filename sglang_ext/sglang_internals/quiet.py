"""Silence of SGLang's warnings that a user can do nothing about: missing accelerators, absent optional
packages.

`silence` is called in the process that starts the engine and, because of `QUIET_VARIABLE`, in the engine's
own."""

from __future__ import annotations

import logging
import os
import sys
import warnings

QUIET_VARIABLE = "RAGSERVE_ENGINE_QUIET"
_PACKAGES = r"(sglang|torch|torchao|transformers|triton|sentence_transformers)(\.|$)"
_BEGINNINGS = {  # of messages, by logger
    "sglang.srt.server_args": ("Cuda graph is disabled because of using torch native",),
    "sglang.srt.models.registry": ("Ignore import error when loading",),
    "sglang.srt.managers.multimodal_processor": ("Ignore import error when loading",),
    "sglang.srt.distributed.bootstrap": ("init_cpu_threads_env and shared memory",),
    "sglang.srt.entrypoints.openai.serving_rerank": (
        "Using fallback token IDs",
        "Failed to get yes/no token",
    ),
    "sglang.srt.utils.common": ("Fail to set RLIMIT",),
}


def silence() -> None:
    """Drop such warnings in this process, and in engine processes that it starts. Idempotent. ``-W`` and
    PYTHONWARNINGS win."""
    os.environ[QUIET_VARIABLE] = "1"
    if not sys.warnoptions:
        warnings.filterwarnings("ignore", category=Warning, module=_PACKAGES)
    for name in _BEGINNINGS:
        logging.getLogger(name).addFilter(_is_useful)


def _is_useful(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_BEGINNINGS.get(record.name, ()))
