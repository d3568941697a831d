"""The model: a plain Llama decoder with the parameter names of Hugging Face."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

Params = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """The sizes of the model; heads have 64 dimensions.

    15 layers instead of the earlier 10, all else equal: 26.8M parameters (53.5 MB in bfloat16). ``README.md``
    has the times of the shapes that were compared."""

    vocab_size: int = 8192
    hidden_size: int = 384
    intermediate_size: int = 1024
    num_hidden_layers: int = 15
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 100000.0
    max_position_embeddings: int = 8192
    rms_norm_eps: float = 1e-5

    def hf_config(self) -> dict[str, Any]:
        """``config.json`` for transformers and SGLang."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **asdict(self),
            "hidden_act": "silu",
            "rope_scaling": None,
            "attention_bias": False,
            "mlp_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "initializer_range": 0.02,
            "use_cache": True,
            "torch_dtype": "bfloat16",
        }

    @classmethod
    def read(cls, folder: Path) -> Shape:
        """Read the shape from a model's ``config.json``."""
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return cls(**{name: config[name] for name in cls.__dataclass_fields__})


def init_params(shape: Shape, device: str, seed: int) -> Params:
    """Random float32 parameters."""
    generator = torch.Generator().manual_seed(seed)
    params = {
        "model.embed_tokens.weight": torch.randn(shape.vocab_size, shape.hidden_size, generator=generator)
        * 0.02,
        "model.norm.weight": torch.ones(shape.hidden_size),
    }
    for i in range(shape.num_hidden_layers):
        params |= {f"model.layers.{i}.{name}": value for name, value in _layer(shape, generator).items()}
    return {name: value.to(device).requires_grad_() for name, value in params.items()}


def _layer(shape: Shape, generator: torch.Generator) -> Params:
    hidden, inner = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    into_residual = 1 / math.sqrt(2 * shape.num_hidden_layers)
    sizes = {
        "self_attn.q_proj": (queries, hidden, 1.0),
        "self_attn.k_proj": (keys, hidden, 1.0),
        "self_attn.v_proj": (keys, hidden, 1.0),
        "self_attn.o_proj": (hidden, queries, into_residual),
        "mlp.gate_proj": (inner, hidden, 1.0),
        "mlp.up_proj": (inner, hidden, 1.0),
        "mlp.down_proj": (hidden, inner, into_residual),
    }
    layer = {
        f"{name}.weight": torch.randn(out, into, generator=generator) * (0.6 * scale / math.sqrt(into))
        for name, (out, into, scale) in sizes.items()
    }
    return layer | {f"{n}_layernorm.weight": torch.ones(hidden) for n in ("input", "post_attention")}


def old_places(old_layers: int, layers: int) -> list[int]:
    """Numbers of a grown model's layers that are the shallower one's."""
    return [round((i + 0.5) * layers / old_layers - 0.5) for i in range(old_layers)]


def grown(params: Params, old: Params, old_layers: int, layers: int) -> None:
    """Copy a shallower model's weights into ``params``, in place.

    The new layers are spread between the old ones. Their output projections are zero, so that the grown model
    computes what the old one does until it is trained."""
    places = old_places(old_layers, layers)
    with torch.no_grad():
        for name, value in params.items():
            parts = name.split(".")
            if parts[1] != "layers":
                value.copy_(old[name])
                continue
            layer = int(parts[2])
            if layer in places:
                parts[2] = str(places.index(layer))
                value.copy_(old[".".join(parts)])
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                value.zero_()


def rope_table(shape: Shape, positions: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [positions, head_dim / 2], float32."""
    half = torch.arange(0, shape.head_dim, 2, device=device, dtype=torch.float32) / shape.head_dim
    angles = torch.arange(positions, device=device, dtype=torch.float32)[:, None] / shape.rope_theta**half
    return angles.cos(), angles.sin()


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = x.float()
    scale = torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)
    return (y * scale).to(x.dtype) * weight.to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [tokens, heads, head_dim] by cos, sin [tokens, head_dim / 2]."""
    a, b = x.float().chunk(2, -1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def before_attention(
    x: torch.Tensor,
    norm: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys (both rotated) and values of one layer, each [tokens, heads, 64]."""
    h = rms_norm(x, norm)
    queries = F.linear(h, q.to(x.dtype)).unflatten(-1, (-1, 64))
    keys = F.linear(h, k.to(x.dtype)).unflatten(-1, (-1, 64))
    values = F.linear(h, v.to(x.dtype)).unflatten(-1, (-1, 64))
    return rotate(queries, cos, sin), rotate(keys, cos, sin), values


def after_attention(
    x: torch.Tensor,
    attended: torch.Tensor,
    o: torch.Tensor,
    norm: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """Add the attention's and the feed-forward's output to the residual stream."""
    x = x + F.linear(attended.flatten(-2), o.to(x.dtype))
    h = rms_norm(x, norm)
    inner = F.silu(F.linear(h, gate.to(x.dtype))) * F.linear(h, up.to(x.dtype))
    return x + F.linear(inner, down.to(x.dtype))


def layer_weights(params: Params, i: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Arguments of `before_attention` and of `after_attention`."""
    first = ("input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    second = ("self_attn.o_proj", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")

    def weights(names: tuple[str, ...]) -> list[torch.Tensor]:
        return [params[f"model.layers.{i}.{name}.weight"] for name in names]

    return weights(first), weights(second)


def save(params: Params, shape: Shape, folder: Path, shard_bytes: int = 15 * 2**20) -> None:
    """Write bfloat16 shards of at most ``shard_bytes`` with ``config.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[Params] = [{}]
    size = 0
    for name, value in params.items():
        tensor = value.detach().to("cpu", torch.bfloat16).contiguous()
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    for i, shard in enumerate(shards):
        beside = folder / "shard.tmp"  # a reader of the folder never finds half a file
        save_file(shard, beside, metadata={"format": "pt"})
        beside.replace(folder / f"model-{i + 1:05d}.safetensors")
    (folder / "config.json").write_text(json.dumps(shape.hf_config(), indent=2) + "\n", encoding="utf-8")


def load(folder: Path) -> Params:
    """Read all safetensors files of a folder, as float32."""
    params: Params = {}
    for path in sorted(folder.glob("*.safetensors")):
        params |= load_file(path)
    return {name: value.float() for name, value in params.items()}


def started(folder: Path, shape: Shape, device: str) -> Params:
    """The weights of a folder, grown to the shape if they are shallower."""
    layers, loaded = Shape.read(folder).num_hidden_layers, load(folder)
    if layers != shape.num_hidden_layers:
        params = init_params(shape, "cpu", 1)
        grown(params, loaded, layers, shape.num_hidden_layers)
        loaded = params
    return {name: value.detach().to(device) for name, value in loaded.items()}


def lacking(params: Params, folder: Path, shape: Shape) -> Params:
    """Leave only weights trainable whose layers the shallower model in ``folder`` lacks, and return them."""
    old = old_places(Shape.read(folder).num_hidden_layers, shape.num_hidden_layers)
    for name, value in params.items():
        parts = name.split(".")
        value.requires_grad_(parts[1] == "layers" and int(parts[2]) not in old)
    return {name: value for name, value in params.items() if value.requires_grad}
