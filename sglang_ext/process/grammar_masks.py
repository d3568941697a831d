"""Grammars that allow no token, as ``{"$ref": "#"}``: nothing can be drawn by their masks, and the forward
pass would fail for all requests in it.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from sglang_ext.stages import stages
from sglang_ext.state import current

FILL = "sglang.srt.constrained.xgrammar_backend.XGrammarGrammar.fill_vocab_mask"
_NO_TOKEN = "the grammar allows no token here: a JSON schema may refer to itself without end"


def after_fill(result: Any, grammar: Any, vocab_mask: Any, idx: int) -> Any:
    """Run after a request's row of the mask is filled: where no token is allowed any one is, and the request
    ends."""
    failed = stages.ending(req for req in current.sampled if req.grammar is not None)
    stages.run("grammar", failed, _end_dead, grammar, vocab_mask[idx])
    return result


def _end_dead(grammar: Any, row: Any) -> None:
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    if row.any():
        return
    row.fill_(-1)
    grammar.accept_token = _accept_any
    for req in current.sampled:
        own = getattr(req.grammar, "grammar", req.grammar)  # one that reasons first has another
        if own is grammar and req.to_finish is None and not req.finished():
            req.to_finish = FINISH_ABORT(_NO_TOKEN, HTTPStatus.BAD_REQUEST, "BadRequestError")


def _accept_any(token: int) -> None:
    """The request ends with this step."""
