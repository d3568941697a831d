"""Load models of sentence-transformers."""

from __future__ import annotations

import os
from typing import Any

from ragserve.errors import InvalidRequest

_MAX_THREADS = 16  # with more, a 6-layer model of width 384 loses more to synchronisation than it gains


def load_model(
    class_name: str, name: str, device: str, *, code: str, param: str, hint: str, **options: Any
) -> Any:
    """Load ``name`` as a class of sentence-transformers, on ``device`` or, with ``auto``, on CUDA if there.

    Raises InvalidRequest with ``code``, ``param`` and ``hint``."""
    from ragserve.engine.compat import prepare, without_collection

    # libgomp's threads spin at every barrier. If another process needs the core (engine, parser, worker), two
    # spinning threads took 80 ms for a question that two sleeping ones embed in 11. Read at torch's import.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with without_collection():
        prepare()  # transformers imports torchvision, which fails as a CUDA build on a machine without CUDA
        import sentence_transformers
        import torch
        from safetensors import SafetensorError
        from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # its progress bar would disturb ours
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        # torch counts the host's cores; a container may own fewer, and more threads than cores thrash
        cores = min(torch.get_num_threads(), len(os.sched_getaffinity(0)), _MAX_THREADS)
        torch.set_num_threads(max(1, cores))
    try:
        return getattr(sentence_transformers, class_name)(name, device=device, **options)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InvalidRequest(
            f"The {param} {name!r} could not be loaded: {reason}", hint=hint, code=code, param=param
        ) from error
