"""What the keys of a head share: which vector it is, and that attention over keys without it does not change
but for what quantising costs, which is then little."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ragserve_kernels.quantize_kv import dequantize_kv
from sglang_ext.analysis.key_offsets import key_offsets
from sglang_ext.attention.pools.quantized_pool import quantized_pool
from sglang_ext.tensors.rope import Rotation
from tests.unit.context.small_model import DIM, KV_HEADS, LAYERS, Layer, runner_of

POSITIONS, TOKENS = 512, 40


class Biased(Layer):
    """Keys with a bias, rotated as SGLang's layers rotate them, if at all."""

    def __init__(self, number: int, rotation: Rotation | None) -> None:
        super().__init__(number)
        self.rotation, self.bias = rotation, torch.randn(KV_HEADS * DIM) * 50
        if rotation is None:
            return
        cos, sin = rotation.angles(torch.arange(2 * POSITIONS))
        self.self_attn.rotary_emb = SimpleNamespace(
            cos_sin_cache=torch.cat((cos, sin), -1), rotary_dim=DIM, is_neox_style=rotation.neox
        )

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, forward_batch: Any, residual: Any
    ) -> tuple[torch.Tensor, None]:
        from sglang.srt.model_executor.forward_context import get_attn_backend

        q, k, v = (hidden_states @ projection for projection in self._projections)
        self.still = (k + self.bias).view(-1, KV_HEADS, DIM)
        k = self.still if self.rotation is None else self.rotation.rotate(self.still, positions)
        v = v.view(-1, KV_HEADS, DIM)
        attended = get_attn_backend().forward(q, k, v, self.self_attn.attn, forward_batch)
        return hidden_states + attended @ self._out, None

    __call__ = forward  # type: ignore[assignment]


def rotation(dim: int, *, neox: bool = True) -> Rotation:
    return Rotation(1e6 ** -(torch.arange(dim // 2) / (dim // 2)), dim, neox=neox)


def runner(rotation: Rotation | None) -> Any:
    made = runner_of(8, seed=1)
    made.model_config = SimpleNamespace(context_len=POSITIONS)
    made.model.model.layers = [Biased(number, rotation) for number in range(LAYERS)]
    return made


@pytest.mark.parametrize("neox", [True, False], ids=["halves", "neighbours"])
def test_an_offset_is_what_keys_share_at_all_positions(neox: bool) -> None:
    rotate = rotation(DIM, neox=neox)
    made = runner(rotate)
    found = key_offsets(made, range(TOKENS))
    assert found is not None
    assert found.shape == (LAYERS, KV_HEADS, DIM)
    for layer, offset in zip(made.model.model.layers, found, strict=True):
        still = layer.still[4:].mean(0, keepdim=True)  # the first tokens are unlike all others
        everywhere = rotate.rotate(still.expand(POSITIONS, -1, -1), torch.arange(POSITIONS))
        assert torch.allclose(offset, everywhere.mean(0), atol=1e-3)


def test_keys_that_are_not_rotated_have_their_mean() -> None:
    made = runner(None)
    found = key_offsets(made, range(TOKENS))
    assert found is not None
    for layer, offset in zip(made.model.model.layers, found, strict=True):
        assert torch.allclose(offset, layer.still[4:].mean(0))


def test_layers_that_no_pass_of_ours_runs_have_none() -> None:
    made = runner(None)
    made.model.model.layers = [SimpleNamespace(forward=lambda other, arguments: None)]
    assert key_offsets(made, range(TOKENS)) is None


@pytest.mark.parametrize(("bits", "most"), [(8, 0.02), (4, 0.25)])
def test_attention_over_keys_without_what_they_share_is_the_same(bits: int, most: float) -> None:
    heads, dim = 2, 64
    draw, rotate, places = torch.Generator().manual_seed(0), rotation(64), torch.arange(POSITIONS)
    shared = torch.zeros(1, heads, dim)
    shared[..., dim // 2 - 3 : dim // 2] = 300.0  # as Qwen2.5-Coder-1.5B, where angles turn slowly
    k = rotate.rotate(torch.randn(POSITIONS, heads, dim, generator=draw) + shared, places)
    v, q = torch.randn(2, POSITIONS, heads, dim, generator=draw)

    def attended(keys: torch.Tensor) -> torch.Tensor:
        return torch.einsum("qhd,khd->hqk", q[:8].double(), keys.double()).mul(dim**-0.5).softmax(-1)

    lost = []
    for offset in (torch.zeros(heads, dim), rotate.rotate(shared.expand_as(k), places).mean(0)):
        pool = quantized_pool(bits)(
            POSITIONS,
            page_size=16,
            dtype=torch.float32,
            head_num=heads,
            head_dim=dim,
            layer_num=2,
            device="cpu",
            enable_memory_saver=False,
        )
        pool.key_offsets[1] = offset
        pool.store(1, places, k, v)
        stored, values = (dequantize_kv(each, places) for each in pool.quantized(1))
        assert torch.allclose(values, v, atol=0.6), "values are stored as they are"
        lost.append(float((attended(stored) - attended(k)).abs().sum(-1).mean()) / 2)
    assert lost[1] < most
    assert lost[0] > 3 * lost[1]
