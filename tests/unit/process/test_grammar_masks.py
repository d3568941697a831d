"""A grammar that allows no token ends its own request, and nobody else's."""

from __future__ import annotations

from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext.process import grammar_masks
from sglang_ext.process.hooks import HOOKS
from sglang_ext.state import current

ENDLESS = {
    "itself": '{"$ref": "#"}',
    "a pair": '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}',
}


def request(grammar: Any) -> Any:
    return SimpleNamespace(grammar=grammar, to_finish=None, finished=lambda: False)


@pytest.mark.parametrize("name", ENDLESS)
def test_a_grammar_that_allows_nothing_ends_its_request(
    name: str, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar
    from transformers import AutoTokenizer
    from xgrammar import (
        GrammarCompiler,
        GrammarMatcher,
        TokenizerInfo,
        allocate_token_bitmask,
        apply_token_bitmask_inplace,
    )

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    size = len(tokenizer)
    compiler = GrammarCompiler(TokenizerInfo.from_huggingface(tokenizer, vocab_size=size))

    def grammar(schema: str) -> Any:
        compiled = compiler.compile_json_schema(schema)
        return XGrammarGrammar(GrammarMatcher(compiled), size, compiled, None)

    grammars = [grammar(ENDLESS[name]), grammar('{"type": "integer"}')]
    reqs = [*map(request, grammars), request(None), request(SimpleNamespace(grammar=grammars[0]))]
    mask = allocate_token_bitmask(len(reqs), size)
    monkeypatch.setattr(current, "sampled", reqs)
    for row, one in enumerate(grammars):
        grammar_masks.after_fill(one.matcher.fill_next_token_bitmask(mask, row), one, mask, row)
    logits = torch.zeros(len(reqs), size)
    apply_token_bitmask_inplace(logits, mask)
    probabilities = torch.softmax(logits, dim=-1)
    assert torch.isfinite(probabilities).all()
    assert (probabilities[1] == 0).any()
    ended = [req.to_finish and req.to_finish.status_code for req in reqs]
    assert ended == [HTTPStatus.BAD_REQUEST, None, None, HTTPStatus.BAD_REQUEST]
    grammars[0].accept_token(5)  # by which SGLang would end it without a reason
    with pytest.raises(ValueError, match="not accepted"):
        grammars[1].accept_token(tokenizer.encode("x", add_special_tokens=False)[0])


def test_the_table_of_hooks_has_it() -> None:
    assert grammar_masks.FILL in [each.target for each in HOOKS]
