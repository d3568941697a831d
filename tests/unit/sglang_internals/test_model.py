"""Models whose decoder layers take other arguments are refused at start, not in the middle of a pass."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext import versions
from sglang_ext.sglang_internals.model import NotComposable, check_layers, unlike_plain_attention


class Plain:
    def forward(self, positions: Any, hidden_states: Any, forward_batch: Any, residual: Any) -> None: ...


class WithOptions:
    def forward(
        self, positions: Any, hidden_states: Any, forward_batch: Any, residual: Any, captured: Any = None
    ) -> None: ...


class WithoutResidual:
    def forward(self, positions: Any, hidden_states: Any, forward_batch: Any) -> None: ...


class OtherOrder:
    def forward(self, hidden_states: Any, positions: Any, forward_batch: Any, residual: Any) -> None: ...


class OneMore:
    def forward(
        self, positions: Any, hidden_states: Any, forward_batch: Any, residual: Any, mask: Any
    ) -> None: ...


def attending(**differs: Any) -> Any:
    plain = {"logit_cap": 0.0, "sliding_window_size": -1, "use_irope": False}
    return SimpleNamespace(self_attn=SimpleNamespace(attn=SimpleNamespace(**plain | differs)))


@pytest.mark.parametrize(
    ("differs", "says"),
    [
        ({"logit_cap": 50.0}, "layer 1 caps its attention scores at 50"),
        ({"sliding_window_size": 128}, "layer 1 attends to a window of 128 tokens"),
        ({"use_irope": True}, "layer 1 scales its queries"),
    ],
)
def test_attention_of_another_kind_is_named(differs: dict[str, Any], says: str) -> None:
    assert unlike_plain_attention(model_of(attending(), attending(sliding_window_size=None))) is None
    assert says in str(unlike_plain_attention(model_of(attending(), attending(**differs))))


def model_of(*layers: Any) -> Any:
    return SimpleNamespace(model=SimpleNamespace(layers=layers))


def test_layers_with_the_usual_arguments_pass() -> None:
    check_layers(model_of(Plain(), WithOptions()))


@pytest.mark.parametrize("layer", [*[WithoutResidual()] * versions.IS_0_5_17, OtherOrder(), OneMore()])
def test_one_other_layer_is_enough_to_refuse(layer: Any) -> None:
    with pytest.raises(NotComposable, match=type(layer).__name__):
        check_layers(model_of(Plain(), layer))


@pytest.mark.skipif(not versions.IS_0_5_17, reason="later versions keep the residual elsewhere in all models")
def test_a_real_model_without_a_residual_argument_is_refused() -> None:
    from sglang.srt.models.llama import LlamaDecoderLayer
    from sglang.srt.models.olmo2 import Olmo2DecoderLayer

    check_layers(model_of(LlamaDecoderLayer.__new__(LlamaDecoderLayer)))
    with pytest.raises(NotComposable, match="Olmo2DecoderLayer"):
        check_layers(model_of(Olmo2DecoderLayer.__new__(Olmo2DecoderLayer)))
