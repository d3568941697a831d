"""Small models with random weights, written to disk, for what the embedded model lacks: multi-head attention,
scaled rotary positions.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tests.conftest import MODEL

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 512}


def random_llama(
    folder: Path,
    *,
    heads: int = 4,
    kv_heads: int = 4,
    head_dim: int = 16,
    rope: dict[str, Any] | None = None,
    positions: int = 2048,
    layers: int = 2,
) -> Path:
    """Write a small Llama with the embedded model's tokenizer. The weights are large: with small ones
    attention is nearly uniform, and an answer would not depend on the positions of keys."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=positions,
        rope_parameters={"rope_theta": 10000.0, **(rope or {"rope_type": "default"})},
        initializer_range=0.3,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, folder)
    return folder


_TOOLS = (
    '{%- if tools -%}{{- \'Call a tool by <tool_call>{"name": ..., "arguments": ...}</tool_call>.\\n\' -}}'
    "{%- for tool in tools -%}{{- tool | tojson + '\\n' -}}{%- endfor -%}{%- endif -%}"
)
_CALLS = (
    "{%- if m['tool_calls'] -%}{{- '<|answer|> ' + (m['content'] | trim) -}}"
    "{%- for call in m['tool_calls'] -%}{{- '<tool_call>' + ({'name': call.function.name, "
    "'arguments': call.function.arguments} | tojson) + '</tool_call>' -}}{%- endfor -%}{{- '<|eos|>' -}}"
)


def with_tools(model: Path) -> Path:
    """Extend a model's chat template by tools and their calls; without these it writes what it did."""
    path = model / "tokenizer_config.json"
    config = json.loads(path.read_text())
    template = config["chat_template"]
    for place, before in (("{%- if documents -%}", _TOOLS), ("{%- if m['role'] in ['document'", _CALLS)):
        assert template.count(place) == 1
        joined = before + ("{%- elif" + place.removeprefix("{%- if") if before is _CALLS else place)
        template = template.replace(place, joined)
    path.write_text(json.dumps(config | {"chat_template": template}))
    return model


def small_models(folder: Path) -> dict[str, Any]:
    """Settings of a server with a random model of grouped queries and a random embedder, written to
    ``folder``."""
    return {
        "model": random_llama(folder / "model", kv_heads=2),
        "embedder": random_embedder(folder / "embedder"),
    }


def random_embedder(folder: Path, width: int = 64) -> Path:
    """Write an embedder of random token vectors: texts with the same words are near each other."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import StaticEmbedding
    from tokenizers import Tokenizer  # type: ignore[import-untyped]

    torch.manual_seed(0)
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    vectors = torch.randn(tokenizer.get_vocab_size(), width)
    SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_weights=vectors)]).save(str(folder))
    return folder
