"""Hooks that 0.5.17 needs and later versions do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

_GRAMMAR = "sglang.srt.constrained.xgrammar_backend.XGrammarGrammar"


def after_token_ids(result: Any, logprobs: Any, *args: Any, **kwargs: Any) -> Any:
    """Give requests without ``token_ids_logprob`` an empty tensor, as SGLang expects of every row. It makes a
    list itself, and such a request beside one with ids would end the scheduler.
    """
    values, ids = result
    if not any(hasattr(value, "tolist") for value in values):
        return None
    return [value if hasattr(value, "tolist") else logprobs.new_empty(0) for value in values], ids


def around_mask_memory(
    original: Callable[..., Any], grammar: Any, vocab_size: int, batch_size: int, device: Any
) -> Any:
    """Allocate a grammar's mask in ordinary memory on a CPU: SGLang always asks for pinned memory."""
    import torch
    from xgrammar import allocate_token_bitmask

    if torch.device(device).type != "cpu":
        return original(grammar, vocab_size, batch_size, device)
    return allocate_token_bitmask(batch_size, vocab_size)


def around_mask(original: Callable[..., Any], grammar: Any, logits: Any, vocab_mask: Any) -> None:
    """Mask logits on a CPU, too."""
    from xgrammar import apply_token_bitmask_inplace

    if logits.device.type == "cpu":
        apply_token_bitmask_inplace(logits, vocab_mask)
    else:
        original(grammar, logits, vocab_mask)


OWN_HOOKS: tuple[
    tuple[str, tuple[str, ...], Callable[..., Any], Literal["before", "after", "around"]], ...
] = (
    (
        "sglang.srt.layers.logprob_processor.get_token_ids_logprobs",
        ("logprobs", "token_ids_logprobs", "no_copy_to_cpu"),
        after_token_ids,
        "after",
    ),
    (
        f"{_GRAMMAR}.allocate_vocab_mask",
        ("self", "vocab_size", "batch_size", "device"),
        around_mask_memory,
        "around",
    ),
    (f"{_GRAMMAR}.apply_vocab_mask", ("self", "logits", "vocab_mask"), around_mask, "around"),
)
