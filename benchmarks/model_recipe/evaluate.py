"""Answer quality of trained weights without the engine: greedy answers, exact match and F1.

    python -m benchmarks.model_recipe.evaluate TRAINED SETS --out eval.json [--n 200] [--modes full,apart]

SETS is a folder of jsonl or jsonl.gz files with question, answers, and docs or ctxs. ``full`` prefills the
whole prompt. ``apart`` hides the system text and the documents from each other and keeps the prompt's
positions, which is what plain reuse with rotated keys (strategy ``concat``) computes. An answer contains the
right one (``holds``) if one of the accepted answers is in it as whole words. Figures are percent, and ``se``
their standard errors. bfloat16 on a GPU, float32 on a CPU."""

from __future__ import annotations

import argparse
import gzip
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.model_recipe import architecture as model
from benchmarks.model_recipe import attention
from benchmarks.model_recipe.architecture import Params, Shape
from benchmarks.model_recipe.corpus import ANSWER, CONTEXT, DOCUMENT, EOS, MODEL, QUESTION, Corpus
from ragserve.verification.metrics import contains_answer, exact_match, token_f1

NEW_TOKENS = 24
FIGURES = ("em", "f1", "holds")
ROOM = {"cuda": 240_000_000, "cpu": 10_000_000}
"""Largest product of batch size and squared prompt length."""
Prompt = tuple[list[int], list[int]]
"""Ids and segments."""


def rows_of(path: Path, n: int) -> list[dict[str, Any]]:
    """Up to ``n`` rows, evenly from the file, with ``docs`` as (title, text)."""
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    rows = [rows[i * len(rows) // n] for i in range(n)] if n < len(rows) else rows
    for row in rows:
        row.setdefault("docs", [(each["title"], each["text"]) for each in row.get("ctxs", [])])
    return rows


class Encoder:
    """Prompts as the product lays them out."""

    def __init__(self) -> None:
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))

    encode = Corpus.encode

    def prompt(self, row: dict[str, Any], apart: bool) -> Prompt:
        from benchmarks.model_recipe.corpus import BOS, SYSTEM, SYSTEM_TEXT

        head = [BOS, SYSTEM, *self.encode(SYSTEM_TEXT)]
        docs = [[DOCUMENT, *self.encode(f"{title}\n{text}\n")] for title, text in row["docs"]]
        tail = [QUESTION, *self.encode(row["question"] + "\n"), ANSWER]
        room = CONTEXT - NEW_TOKENS - 8 - len(head) - len(tail)
        while sum(map(len, docs)) > room:
            docs.pop()
        parts = [head, *docs]
        ids = [token for part in [*parts, tail] for token in part]
        numbers = [i if apart else -1 for i, part in enumerate(parts) for _ in part]
        return ids, numbers + [-1] * len(tail)


class Reader:
    """Weights that answer in batches."""

    def __init__(self, folder: Path) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        self.shape = Shape.read(folder)
        loaded = model.load(folder)
        self.params: Params = {n: p.to(self.device, self.dtype) for n, p in loaded.items()}
        self.table = model.rope_table(self.shape, self.shape.max_position_embeddings, self.device)

    @torch.no_grad()
    def answers(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Greedy answers, without the end token."""
        room = ROOM[self.device]
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i][0]))
        out: list[list[int]] = [[] for _ in prompts]
        while order:
            size = 1
            while size < min(len(order), 64) and (size + 1) * len(prompts[order[size]][0]) ** 2 <= room:
                size += 1
            batch, order = order[:size], order[size:]
            for i, answer in zip(batch, self._batch([prompts[i] for i in batch]), strict=True):
                out[i] = answer
        return out

    def _batch(self, prompts: list[Prompt]) -> list[list[int]]:
        longest = max(len(ids) for ids, _ in prompts)
        ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
        position, segment, sample = torch.zeros_like(ids), torch.full_like(ids, -1), torch.zeros_like(ids)
        for row, (tokens, numbers) in enumerate(prompts):
            at = longest - len(tokens)
            ids[row, at:], segment[row, at:] = torch.tensor(tokens), torch.tensor(numbers)
            position[row, at:], sample[row, at:] = torch.arange(len(tokens)), 1
        ids, position, segment, sample = (x.to(self.device) for x in (ids, position, segment, sample))
        allowed = torch.stack([attention.mask(s, g) for s, g in zip(sample, segment, strict=True)])
        cache: list[tuple[torch.Tensor, torch.Tensor]] = []
        token = self._forward(ids, position, allowed, cache)
        found, seen, last = [token], sample.bool(), position[:, -1]
        for _ in range(NEW_TOKENS - 1):
            seen = torch.cat([seen, torch.ones_like(seen[:, :1])], 1)
            last = last + 1
            token = self._forward(token[:, None], last[:, None], seen[:, None], cache)
            found.append(token)
        rows = torch.stack(found, 1).tolist()
        return [row[: row.index(EOS)] if EOS in row else row for row in rows]

    def _forward(
        self, ids: torch.Tensor, position: torch.Tensor, allowed: torch.Tensor, cache: list[Any]
    ) -> torch.Tensor:
        """Next tokens [batch]; ids and position [batch, new], allowed [batch, new, past + new]."""
        x = F.embedding(ids, self.params["model.embed_tokens.weight"])
        cos, sin = (table[position] for table in self.table)
        group = self.shape.num_attention_heads // self.shape.num_key_value_heads
        for i in range(self.shape.num_hidden_layers):
            first, second = model.layer_weights(self.params, i)
            q, k, v = model.before_attention(x, *first, cos, sin)
            if i < len(cache):
                k, v = torch.cat([cache[i][0], k], 1), torch.cat([cache[i][1], v], 1)
                cache[i] = (k, v)
            else:
                cache.append((k, v))
            k, v = (heads.repeat_interleave(group, 2).transpose(1, 2) for heads in (k, v))
            attended = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=allowed[:, None])
            x = model.after_attention(x, attended.transpose(1, 2), *second)
        x = model.rms_norm(x[:, -1], self.params["model.norm.weight"])
        return F.linear(x, self.params["model.embed_tokens.weight"]).argmax(-1)


def scored(answer: str, accepted: Sequence[str]) -> tuple[float, float, float]:
    """Exact match, F1 and whether the answer holds an accepted one, best over the accepted."""
    return (
        exact_match(answer, accepted),
        token_f1(answer, accepted),
        float(contains_answer(answer, accepted)),
    )


def standard_error(values: Sequence[float]) -> float | None:
    """Of the values' mean, in percent; None for a single value."""
    if len(values) < 2:
        return None
    return round(100 * statistics.stdev(values) / len(values) ** 0.5, 1)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trained", type=Path)
    parser.add_argument("sets", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--n", type=int, default=200)
    parser.add_argument("--modes", default="full,apart")
    parser.add_argument("--only", default="", help="names of sets, with commas")
    options = parser.parse_args()
    reader, encoder = Reader(options.trained), Encoder()
    results: dict[str, Any] = {}
    for path in sorted(options.sets.glob("*.jsonl*")):
        name = path.name.split(".")[0]
        if options.only and name not in options.only.split(","):
            continue
        rows = rows_of(path, options.n)
        for mode in options.modes.split(","):
            started = time.monotonic()
            found = reader.answers([encoder.prompt(row, mode == "apart") for row in rows])
            texts = [encoder.tokenizer.decode(ids).strip() for ids in found]
            scores = [scored(text, row["answers"]) for text, row in zip(texts, rows, strict=True)]
            means = [round(100 * sum(values) / len(rows), 1) for values in zip(*scores, strict=True)]
            errors = [standard_error(values) for values in zip(*scores, strict=True)]
            figures: dict[str, Any] = dict(zip(FIGURES, means, strict=True))
            figures["se"] = dict(zip(FIGURES, errors, strict=True))
            results[f"{name}/{mode}"] = {"n": len(rows), **figures}
            shown = random.Random(0).sample(range(len(rows)), min(3, len(rows)))
            examples = [(rows[i]["question"][:70], rows[i]["answers"][0][:30], texts[i][:40]) for i in shown]
            print(name, mode, results[f"{name}/{mode}"], f"{time.monotonic() - started:.1f} s", examples)
            options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
