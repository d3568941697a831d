"""Masks of grammars on a CPU: SGLang makes and applies them on accelerators only, and a request with a
grammar would end the server. And masks that allow no token, as those of ``{"$ref": "#"}``: nothing can be
drawn by them, and the forward pass would fail for all requests in it.
"""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from sglang_ext.stages import stages
from sglang_ext.state import current

NEW = "sglang.srt.constrained.xgrammar_backend.XGrammarGrammar.allocate_vocab_mask"
FILL = "sglang.srt.constrained.xgrammar_backend.XGrammarGrammar.fill_vocab_mask"
MASK = "sglang.srt.constrained.xgrammar_backend.XGrammarGrammar.apply_vocab_mask"
SIZES = ("self", "vocab_size", "batch_size", "device")
MASKED = ("self", "logits", "vocab_mask")
_NO_TOKEN = "the grammar allows no token here: a JSON schema may refer to itself without end"


def around_mask_memory(
    original: Callable[..., Any], grammar: Any, vocab_size: int, batch_size: int, device: Any
) -> Any:
    """Allocate the mask in ordinary memory: SGLang 0.5.17 always asks for pinned memory."""
    import torch
    from xgrammar import allocate_token_bitmask

    if torch.device(device).type != "cpu":
        return original(grammar, vocab_size, batch_size, device)
    return allocate_token_bitmask(batch_size, vocab_size)


def after_fill(result: Any, grammar: Any, vocab_mask: Any, idx: int) -> Any:
    """Run after a request's row of the mask is filled: where no token is allowed any one is, and the request
    ends (`around_mask`)."""
    if not vocab_mask[idx].any():
        vocab_mask[idx] = -1
        grammar.accept_token = _accept_any
        grammar.ragserve_dead = True
    return result


def _accept_any(token: int) -> None:
    """The request ends with this step."""


def _end_dead(reqs: Any) -> None:
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    for req in reqs:
        grammar = getattr(req.grammar, "grammar", req.grammar)  # one that reasons first has another
        if getattr(grammar, "ragserve_dead", False) and req.to_finish is None and not req.finished():
            req.to_finish = FINISH_ABORT(_NO_TOKEN, HTTPStatus.BAD_REQUEST, "BadRequestError")


def around_mask(original: Callable[..., Any], grammar: Any, logits: Any, vocab_mask: Any) -> None:
    """Mask logits on a CPU, too."""
    _end_dead(current.sampled)
    if logits.device.type != "cpu":
        original(grammar, logits, vocab_mask)
        return
    from xgrammar import apply_token_bitmask_inplace

    failed = stages.ending(req for req in current.sampled if req.grammar is not None)
    stages.run("grammar", failed, apply_token_bitmask_inplace, logits, vocab_mask)
