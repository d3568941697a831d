"""Tiny models of sentence-transformers with random weights, made in a folder without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

WORDS = (
    *("a", "by", "of", "on", "the", "was", "who", "built", "reef", "rock", "soup", "leeks", "lighthouse"),
    *("query", "passage", "alan", "robert", "stevenson", "skerryvore", "bell"),
)
LENGTH = 16  # tokens that the models read


def _config(vocab_size: int = 100, **fields: Any) -> Any:
    from transformers import BertConfig

    return BertConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=LENGTH,
        initializer_range=1.0,
        **fields,
    )


def _words(folder: Path) -> Any:
    from transformers import BertTokenizerFast

    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, ".", ":", "?"]
    (folder / "vocab.txt").write_text("\n".join(vocabulary), encoding="utf-8")
    return BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=LENGTH)


def _bytes() -> Any:
    """A tokenizer whose tokens are the bytes of UTF-8."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(["[PAD]", *alphabet])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", model_max_length=LENGTH)


def _save(folder: Path, model: Any, byte_level: bool = False) -> str:
    folder.mkdir()
    tokenizer = _bytes() if byte_level else _words(folder)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return str(folder)


def cross_encoder(folder: Path, labels: int = 1) -> str:
    """Make a CrossEncoder and return its folder."""
    import torch
    from transformers import BertForSequenceClassification

    torch.manual_seed(0)
    return _save(folder, BertForSequenceClassification(_config(num_labels=labels)))


def embedder(folder: Path, prompts: dict[str, str], *, byte_level: bool = False) -> str:
    """Make a SentenceTransformer that takes the mean of the tokens, and return its folder."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers import BertModel

    torch.manual_seed(0)
    bert = _save(folder / "bert", BertModel(_config(300 if byte_level else 100)), byte_level)
    transformer = Transformer(bert, max_seq_length=LENGTH)
    model = SentenceTransformer(modules=[transformer, Pooling(16)], prompts=prompts, device="cpu")
    model.save(str(folder / "embedder"))
    return str(folder / "embedder")
