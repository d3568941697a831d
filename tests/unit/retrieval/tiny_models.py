"""Tiny models of sentence-transformers with random weights, made in a folder without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

WORDS = (
    *("a", "by", "of", "on", "the", "was", "who", "built", "reef", "rock", "soup", "leeks", "lighthouse"),
    *("query", "passage", "alan", "robert", "stevenson", "skerryvore", "bell"),
)
LENGTH = 16  # tokens that the models read


def _config(**fields: Any) -> Any:
    from transformers import BertConfig

    return BertConfig(
        vocab_size=100,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=LENGTH,
        initializer_range=1.0,
        **fields,
    )


def _save(folder: Path, model: Any) -> str:
    from transformers import BertTokenizerFast

    folder.mkdir()
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, ".", ":", "?"]
    (folder / "vocab.txt").write_text("\n".join(vocabulary), encoding="utf-8")
    tokenizer = BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=LENGTH)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return str(folder)


def cross_encoder(folder: Path, labels: int = 1) -> str:
    """Make a CrossEncoder and return its folder."""
    import torch
    from transformers import BertForSequenceClassification

    torch.manual_seed(0)
    return _save(folder, BertForSequenceClassification(_config(num_labels=labels)))


def embedder(folder: Path, prompts: dict[str, str]) -> str:
    """Make a SentenceTransformer that takes the mean of the tokens, and return its folder."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers import BertModel

    torch.manual_seed(0)
    transformer = Transformer(_save(folder / "bert", BertModel(_config())), max_seq_length=LENGTH)
    model = SentenceTransformer(modules=[transformer, Pooling(16)], prompts=prompts, device="cpu")
    model.save(str(folder / "embedder"))
    return str(folder / "embedder")
