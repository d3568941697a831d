"""What the pool of few bits leaves out of a biased model's keys: which vector it is, and that attention does
not change but for what quantising costs, which is then little."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ragserve_kernels.quantize_kv import dequantize_kv
from sglang_ext.attention.pools.key_offsets import key_offsets
from sglang_ext.attention.pools.quantized_pool import quantized_pool
from sglang_ext.tensors.rope import Rotation

HEADS, DIM, POSITIONS, LAYERS = 2, 64, 512, 2


class Attention(torch.nn.Module):
    """Laid out as SGLang's Qwen2Attention."""

    def __init__(self, layer: int, rotation: Rotation, *, bias: bool) -> None:
        super().__init__()
        self.q_size, self.kv_size = 4 * DIM, HEADS * DIM
        self.qkv_proj = torch.nn.Linear(8, self.q_size + 2 * self.kv_size, bias=bias)
        self.attn = SimpleNamespace(layer_id=layer, qk_head_dim=DIM)
        cos, sin = rotation.angles(torch.arange(2 * POSITIONS))
        self.rotary_emb = SimpleNamespace(
            cos_sin_cache=torch.cat((cos, sin), -1),
            rotary_dim=rotation.rotary_dim,
            is_neox_style=rotation.neox,
        )


def model(rotation: Rotation, *, bias: bool = True) -> torch.nn.ModuleList:
    torch.manual_seed(0)
    return torch.nn.ModuleList(Attention(layer, rotation, bias=bias) for layer in range(LAYERS))


def rotation(*, neox: bool = True) -> Rotation:
    return Rotation(1e6 ** -(torch.arange(DIM // 2) / (DIM // 2)), DIM, neox=neox)


@pytest.mark.parametrize("neox", [True, False], ids=["halves", "neighbours"])
def test_an_offset_is_the_mean_of_the_rotated_bias(neox: bool) -> None:
    rotate, made = rotation(neox=neox), model(rotation(neox=neox))
    found = key_offsets(made, POSITIONS)
    assert found is not None
    assert found.shape == (LAYERS, HEADS, DIM)
    for layer, attention in enumerate(made):
        bias = attention.qkv_proj.bias.detach()[4 * DIM : 6 * DIM].view(1, HEADS, DIM)
        everywhere = rotate.rotate(bias.expand(POSITIONS, -1, -1), torch.arange(POSITIONS))
        assert torch.allclose(found[layer], everywhere.mean(0), atol=1e-5)


def test_models_without_a_bias_of_keys_have_none() -> None:
    assert key_offsets(model(rotation(), bias=False), POSITIONS) is None
    normed = model(rotation())
    for attention in normed:
        attention.k_norm = torch.nn.Identity()  # behind the bias
    assert key_offsets(normed, POSITIONS) is None
    assert key_offsets(torch.nn.ModuleList([*model(rotation())][1:]), POSITIONS) is None, "of some layers"


@pytest.mark.parametrize(("bits", "most"), [(8, 0.02), (4, 0.25)])
def test_attention_over_keys_without_the_offset_is_the_same(bits: int, most: float) -> None:
    rotate, made = rotation(), model(rotation())
    places = torch.arange(POSITIONS)
    with torch.no_grad():
        for attention in made:  # as in Qwen2.5-Coder-1.5B: large where angles turn slowly
            attention.qkv_proj.bias.zero_()
            attention.qkv_proj.bias[4 * DIM : 6 * DIM].view(HEADS, DIM)[:, DIM // 2 - 3 : DIM // 2] = 300.0
    bias = made[0].qkv_proj.bias.detach()[4 * DIM : 6 * DIM].view(1, HEADS, DIM)
    k = rotate.rotate(torch.randn(POSITIONS, HEADS, DIM) + bias, places)
    v, q = torch.randn(2, POSITIONS, HEADS, DIM)

    def attended(keys: torch.Tensor) -> torch.Tensor:
        return torch.einsum("qhd,khd->hqk", q[:8].double(), keys.double()).mul(DIM**-0.5).softmax(-1)

    lost = []
    for offsets in (None, key_offsets(made, POSITIONS)):
        pool = quantized_pool(bits)(
            POSITIONS,
            page_size=16,
            dtype=torch.float32,
            head_num=HEADS,
            head_dim=DIM,
            layer_num=LAYERS,
            device="cpu",
            enable_memory_saver=False,
        )
        pool.key_offsets = offsets
        pool.store(0, places, k, v)
        stored, values = (dequantize_kv(each, places) for each in pool.quantized(0))
        assert torch.allclose(values, v, atol=0.6), "values are stored as they are"
        lost.append(float((attended(stored) - attended(k)).abs().sum(-1).mean()) / 2)
    assert lost[1] < most
    assert lost[0] > 3 * lost[1]
