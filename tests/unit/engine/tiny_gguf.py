"""A tiny Llama as llama.cpp's converter writes it, for tests of what reads GGUF."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.conftest import MODEL

LAYERS, WIDTH, INNER, HEADS, KV_HEADS = 2, 64, 96, 4, 2
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries and keys in the order in which llama.cpp rotates them."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def tiny_llama() -> Any:
    """Random weights, with the vocabulary of the embedded model."""
    torch.manual_seed(0)
    vocabulary = json.loads((MODEL / "config.json").read_text())["vocab_size"]
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def write_gguf(model: Any, path: Path) -> Path:
    """Write the model, its matrices in 8 bits."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(model.config.vocab_size)
    _add_tokenizer(writer, model.config.vocab_size)
    state = {name: tensor.float().numpy() for name, tensor in model.state_dict().items()}
    _add(writer, "token_embd.weight", state["model.embed_tokens.weight"])
    _add(writer, "output_norm.weight", state["model.norm.weight"])
    for layer in range(LAYERS):
        for ours, theirs in NAMES.items():
            weight = state[f"model.layers.{layer}.{ours}.weight"]
            if theirs in ("attn_q", "attn_k"):
                weight = interleaved(weight, HEADS if theirs == "attn_q" else KV_HEADS)
            _add(writer, f"blk.{layer}.{theirs}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: Any, name: str, weight: np.ndarray) -> None:
    if weight.ndim == 1:
        writer.add_tensor(name, weight)
        return
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(weight), kind), raw_dtype=kind)


def _add_tokenizer(writer: Any, size: int) -> None:
    tokenizer = json.loads((MODEL / "tokenizer.json").read_text(encoding="utf-8"))
    tokens = {number: token for token, number in tokenizer["model"]["vocab"].items()}
    tokens |= {each["id"]: each["content"] for each in tokenizer["added_tokens"]}
    special = {each["id"] for each in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([tokens.get(number, f"<unused{number}>") for number in range(size)])
    writer.add_token_types([3 if number in special else 1 for number in range(size)])
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
