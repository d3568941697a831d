"""Small random models with a real tokenizer and chat template, and rows to train them with."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

from ragserve.adapt.low_rank import AdaptedModel
from ragserve.adapt.training_rows import TrainingPassage, TrainingRow
from ragserve.answering.prompt import load_tokenizer
from ragserve.engine.compat import prepare

TOKENIZER = Path(__file__).resolve().parents[3] / "examples" / "models" / "ragserve-tiny"


def make_model(folder: Path, family: str = "llama", **more: Any) -> Path:
    """Write a model of two layers with random weights, the same every time."""
    prepare()
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 8192, "initializer_range": 0.2}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "max_position_embeddings": 2048}
    config = AutoConfig.for_model(family, **sizes, **ends, tie_word_embeddings=True, dtype="float32", **more)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TOKENIZER / name, folder / name)
    (folder / "ragserve-gate.json").write_text("{}")
    return folder


def load(folder: Path, prefix: int = 24, room: int = 512) -> AdaptedModel:
    """Load a model whose documents are prefilled behind so many tokens, in float32 on any machine."""
    tokenizer = load_tokenizer(str(folder))
    found = AdaptedModel.load(folder, tokens(prefix, 7), tokenizer, room=room)
    found.causal.float()
    return found


def tokens(count: int, seed: int) -> list[int]:
    """Random token ids."""
    draw = random.Random(seed)
    return [draw.randrange(10, 8000) for _ in range(count)]


def rows(count: int, passages: int = 4) -> list[TrainingRow]:
    """Questions about made-up stations, each with the passage that answers among others."""
    names = [f"station {number}" for number in range(count)]
    texts = [
        f"The {name} is led by Ada {chr(65 + n % 26)}. It has {n + 3} rooms." for n, name in enumerate(names)
    ]
    found = []
    for n, name in enumerate(names):
        shown = [
            TrainingPassage(title=names[(n + i) % count], text=texts[(n + i) % count])
            for i in range(passages)
        ]
        found.append(
            TrainingRow(
                question=f"How many rooms has {name}?", answer=str(n + 3), passages=tuple(shown), gold=(0,)
            )
        )
    return found


def longer(row: TrainingRow, words: int) -> TrainingRow:
    """A row whose passages have so many words before what they say."""
    passages = [each.model_copy(update={"text": f"{'Once ' * words}{each.text}"}) for each in row.passages]
    return row.model_copy(update={"passages": tuple(passages)})


def write(path: Path, given: list[TrainingRow]) -> Path:
    """Write rows as a data file."""
    path.write_text("".join(json.dumps(row.model_dump(mode="json")) + "\n" for row in given))
    return path
