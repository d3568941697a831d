"""Make ``import sglang`` work on a machine whose torchvision is a CUDA build and whose torch is not.

SGLang 0.5.17 imports torchvision at import time. Package registries carry it as a CUDA build: without CUDA
its shared library cannot load, and its Python layer then fails to register meta kernels for two operators
that the library would have declared. Declaring their schemas is enough, because text serving does not call
them."""

from __future__ import annotations

import importlib.util
import threading
from pathlib import Path

_OPERATORS = ("nms", "qnms")
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_lock = threading.Lock()
_prepared = False


def prepare() -> None:
    """Call before the first ``import sglang`` of a process. Idempotent and thread-safe; does nothing where
    torchvision works.
    """
    global _prepared
    with _lock:
        if _prepared:
            return
        if _torchvision_library_is_broken():
            from torch import library

            for name in _OPERATORS:
                library.define(f"torchvision::{name}", _SCHEMA)
        _prepared = True


def _torchvision_library_is_broken() -> bool:
    spec = importlib.util.find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations:
        return False
    library = Path(next(iter(spec.submodule_search_locations))) / "_C.so"
    if not library.exists():
        return False
    import torch

    try:
        torch.ops.load_library(str(library))
    except OSError:
        return True
    return False
