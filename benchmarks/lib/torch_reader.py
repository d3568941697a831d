"""Answers of the embedded model without the engine, and the frame of measurements that ask question sets."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.model_recipe import architecture as model
from ragserve.eval.data import Question, by_name, interleaved
from ragserve.eval.data import load as load_questions
from ragserve.verification import rows

NEW_TOKENS, END = 24, 2
Layers = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys, rotated to their positions, and values of each layer, each [tokens, KV heads, 64]."""


class TorchReader:
    """The embedded model in plain PyTorch, float32, one prompt at a time; tensors are on ``device``."""

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        shape = model.Shape.read(folder)
        self._params = {name: value.float().to(device) for name, value in model.load(folder).items()}
        self._table = model.rope_table(shape, shape.max_position_embeddings, device)
        self._layers = shape.num_hidden_layers

    @torch.no_grad()
    def read(
        self, ids: torch.Tensor, places: torch.Tensor, past: Layers, seen: torch.Tensor | None
    ) -> tuple[torch.Tensor, Layers]:
        """The last token's logits [vocabulary], and the KV of ``past`` [P] and the new tokens.

        ``ids``, ``places`` int64 [T]; ``seen`` bool [T, P + T]; None: those before."""
        x = F.embedding(ids, self._params["model.embed_tokens.weight"])
        cos, sin = (table[places] for table in self._table)
        found: Layers = []
        for i in range(self._layers):
            first, second = model.layer_weights(self._params, i)
            q, k, v = model.before_attention(x, *first, cos, sin)
            if past:
                k, v = torch.cat([past[i][0], k]), torch.cat([past[i][1], v])
            found.append((k, v))
            keys, values = (
                part.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(0, 1) for part in (k, v)
            )
            attended = F.scaled_dot_product_attention(
                q.transpose(0, 1), keys, values, attn_mask=seen, is_causal=seen is None
            )
            x = model.after_attention(x, attended.transpose(0, 1), *second)
        last = model.rms_norm(x[-1], self._params["model.norm.weight"])
        return F.linear(last, self._params["model.embed_tokens.weight"]), found

    def answer(
        self, ids: torch.Tensor, places: torch.Tensor, past: Layers, past_places: torch.Tensor
    ) -> list[int]:
        """Greedy answer to new tokens that see ``past`` and each other by position, without the end."""
        seen = torch.cat([past_places, places]) <= places[:, None]
        logits, layers = self.read(ids, places, past, seen)
        found: list[int] = []
        while len(found) < NEW_TOKENS and (token := int(logits.argmax())) != END:
            found.append(token)
            seen = places.new_ones(1, layers[0][0].shape[0] + 1, dtype=torch.bool)
            logits, layers = self.read(ids.new_tensor([token]), places[-1:] + len(found), layers, seen)
        return found


def arguments(description: str | None, limit: int, out: Path) -> argparse.ArgumentParser:
    """Which questions are asked, for how long, and where the rows go."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, action="append", required=True, help="a question set")
    parser.add_argument("--limit", type=int, default=limit, help="questions of each set")
    parser.add_argument("--work", type=Path, required=True, help="folder of rows; the same one goes on")
    parser.add_argument("--seconds", type=float, default=math.inf, help="ask no further after that time")
    parser.add_argument("--out", type=Path, default=out)
    return parser


def write_rows(
    given: argparse.Namespace, asked: Callable[[str, Question, set[str]], Iterator[rows.Row]]
) -> None:
    """Ask all sets' questions in turn while there is time. ``asked`` gives a question's rows; it is told the
    set and the strategies that have a row already."""
    ends, known = time.monotonic() + given.seconds, rows.read(given.work)
    sets = {name: load_questions(path, given.limit) for name, path in by_name(given.data).items()}
    with rows.appending(given.work / "rows-0.jsonl") as write:
        for name, question in interleaved(sets):
            if time.monotonic() > ends:
                break
            done = {strategy for own, one, strategy in known if (own, one) == (name, question.id)}
            for row in asked(name, question, done):
                write(row)
