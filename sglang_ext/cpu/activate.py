"""The plain-PyTorch CPU platform: SGLang 0.5.17 on a machine without an accelerator.

SGLang's own CPU engine needs compiled kernels that no package registry carries. This out-of-tree platform
runs the same scheduler, radix cache and models on PyTorch's operators instead: correct, and fast enough for
small models, tests and laptops. It stays inactive where CUDA (or another accelerator that SGLang supports) is
available, so installing this project never changes a GPU server."""

from __future__ import annotations


def activate() -> str | None:
    """Entry point `sglang.srt.platforms`: the platform's class name, or None where an accelerator is
    available.
    """
    import torch

    if torch.cuda.is_available() or (hasattr(torch, "xpu") and torch.xpu.is_available()):
        return None
    # As the platform's own. SGLang decorates functions with `torch.compile` as it is imported; the default
    # backend would import a compiler that this platform never runs.
    if hasattr(torch.compiler, "set_default_backend"):  # PyTorch 2.11 has no such function
        torch.compiler.set_default_backend("eager")
    return "sglang_ext.cpu.platform.PlainCpuPlatform"
