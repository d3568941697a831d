"""Masks of grammars on a CPU: SGLang makes and applies them on accelerators only, and a request with a
grammar would end the server.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_ext.stages import stages
from sglang_ext.state import current


def around_mask_memory(
    original: Callable[..., Any], grammar: Any, vocab_size: int, batch_size: int, device: Any
) -> Any:
    """Allocate the mask in ordinary memory: SGLang 0.5.17 always asks for pinned memory."""
    import torch
    from xgrammar import allocate_token_bitmask

    if torch.device(device).type != "cpu":
        return original(grammar, vocab_size, batch_size, device)
    return allocate_token_bitmask(batch_size, vocab_size)


def around_mask(original: Callable[..., Any], grammar: Any, logits: Any, vocab_mask: Any) -> None:
    """Mask logits on a CPU, too."""
    if logits.device.type != "cpu":
        original(grammar, logits, vocab_mask)
        return
    from xgrammar import apply_token_bitmask_inplace

    failed = stages.ending(req for req in current.sampled if req.grammar is not None)
    stages.run("grammar", failed, apply_token_bitmask_inplace, logits, vocab_mask)
