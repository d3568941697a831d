"""Which of SGLang's rotary embeddings let cached keys move, and that the rotation is the embedding's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext.sglang_internals.model import NotComposable
from sglang_ext.tensors.rope import rotation_of

HEAD, POSITIONS = 16, 512


def model_with(rope: dict[str, Any] | None, layers: int = 2, base: int = 10_000) -> Any:
    from sglang.srt.layers.rotary_embedding import get_rope
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", device="cpu"))
    embedding = get_rope(HEAD, HEAD, POSITIONS, base, True, rope)
    return SimpleNamespace(
        model=SimpleNamespace(
            layers=[SimpleNamespace(self_attn=SimpleNamespace(rotary_emb=embedding))] * layers
        )
    )


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    "rope", [None, {"rope_type": "linear", "factor": 4.0}, LLAMA3], ids=["plain", "linear", "llama3"]
)
def test_a_moved_key_is_the_key_at_its_new_place(rope: dict[str, Any] | None) -> None:
    model = model_with(rope)
    embedding = model.model.layers[0].self_attn.rotary_emb
    cache = embedding.cos_sin_cache[:POSITIONS].float()  # [positions, head_dim]: cosines, then sines

    def at(k: torch.Tensor, position: int) -> torch.Tensor:
        cos, sin = cache[position].chunk(2)
        a, b = k.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    torch.manual_seed(1)
    k = torch.randn(3, HEAD)
    for position, shift in ((0, 1), (7, 90), (100, 400), (300, -250)):
        moved = rotation_of(model).rotate(at(k, position)[:, None], torch.full((3,), shift))[:, 0]
        torch.testing.assert_close(moved, at(k, position + shift), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("rope", "kind"),
    [
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
            "YaRNScalingRotaryEmbedding",
        ),
        ({"rope_type": "dynamic", "factor": 4.0}, "DynamicNTKScalingRotaryEmbedding"),
    ],
    ids=["yarn", "dynamic"],
)
def test_positions_that_cannot_move_are_refused_by_name_and_with_advice(
    rope: dict[str, Any], kind: str
) -> None:
    with pytest.raises(NotComposable, match=rf"{kind}.*'prefix' or 'full'"):
        rotation_of(model_with(rope))


def test_a_model_that_mixes_kinds_or_is_laid_out_otherwise_is_refused() -> None:
    mixed = model_with(None)
    mixed.model.layers = [*mixed.model.layers, *model_with(LLAMA3).model.layers]
    with pytest.raises(NotComposable):
        rotation_of(mixed)
    other_base = model_with(None)
    other_base.model.layers = [*other_base.model.layers, *model_with(None, base=500_000).model.layers]
    with pytest.raises(NotComposable, match="same rotary angles in every layer"):
        rotation_of(other_base)
    with pytest.raises(NotComposable, match=r"model\.model\.layers"):
        rotation_of(SimpleNamespace(model=SimpleNamespace()))
