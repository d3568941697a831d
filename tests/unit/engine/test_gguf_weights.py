"""A GGUF file is served as the folder that its weights are dequantised to, once."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from ragserve.commands.options import settings_from, with_settings
from ragserve.config import Settings
from ragserve.engine import gguf_weights
from ragserve.engine.gguf_weights import as_folder, gguf_of
from ragserve.errors import InvalidRequest, StorageFull
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


@pytest.fixture(scope="module")
def model() -> Any:
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


@pytest.fixture(scope="module")
def file(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as llama.cpp's converter writes it, its matrices in 8 bits."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
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


def test_the_folder_has_the_models_weights_and_its_tokens(file: Path, model: Any, tmp_path: Path) -> None:
    said: list[str] = []
    folder = as_folder(file, tmp_path / "models", said.append)
    served = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.arange(5, 45)[None]
    with torch.no_grad():
        wanted, found = model(ids).logits, served(ids).logits
    assert torch.nn.functional.cosine_similarity(wanted, found, dim=-1).min() > 0.999, "8 bits"
    text = "The observatory was founded in 1902."
    ours, theirs = (AutoTokenizer.from_pretrained(each) for each in (MODEL, folder))
    wanted_ids = ours.encode(text, add_special_tokens=False)
    assert theirs.encode(text, add_special_tokens=False) == wanted_ids
    assert len(said) == 1

    assert as_folder(file, tmp_path / "models", said.append) == folder, "and is made once"
    assert len(said) == 1
    assert [path.name for path in (tmp_path / "models").iterdir()] == [folder.name], "nothing else is left"


def test_a_full_disk_leaves_nothing(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(gguf_weights, "_write", full)
    with pytest.raises(StorageFull, match="no room"):
        as_folder(file, tmp_path / "models")
    assert list((tmp_path / "models").iterdir()) == []


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"GGUF and nothing more", "cannot be dequantised"), (b"", "cannot be dequantised")],
    ids=["damaged", "empty"],
)
def test_a_damaged_file_is_refused_in_one_line(content: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(InvalidRequest, match=says) as refused:
        as_folder(path, tmp_path / "models")
    assert "\n" not in str(refused.value)


def test_which_models_have_their_weights_in_gguf(file: Path, tmp_path: Path) -> None:
    assert gguf_of(str(MODEL)) is None
    assert gguf_of("Qwen/Qwen3-8B") is None
    renamed = shutil.copy(file, tmp_path / "weights")
    assert gguf_of(str(renamed)) == renamed
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert gguf_of(str(folder)) is None
    first = shutil.copy(file, folder / "a.gguf")
    assert gguf_of(str(folder)) == first
    shutil.copy(file, folder / "b.gguf")
    with pytest.raises(InvalidRequest, match=r"2 GGUF files: a\.gguf, b\.gguf"):
        gguf_of(str(folder))
    part = shutil.copy(file, tmp_path / "model-00001-of-00003.gguf")
    with pytest.raises(InvalidRequest, match="one part"):
        gguf_of(str(part))


@pytest.mark.parametrize("elsewhere", [False, True])
def test_commands_that_read_a_model_get_the_folder(file: Path, tmp_path: Path, elsewhere: bool) -> None:
    given: list[Settings] = []

    def command(settings: Settings) -> None:
        given.append(settings)

    run: Callable[..., Any] = with_settings(command, ["model", "data_dir", "engine_url"], make=settings_from)
    url = "http://127.0.0.1:9" if elsewhere else None
    run(model=str(file), data_dir=tmp_path, engine_url=url)
    inside = Path(given[0].model).is_relative_to(tmp_path / "models")
    assert inside is not elsewhere, "an engine elsewhere has its own model"
