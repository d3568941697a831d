"""Questions as token ids, documents computed alone, and what the model answers over reused KV."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from examples.reuse_rules.model import Cache, Llama

SYSTEM = "<|bos|><|system|>\nAnswer the question from the documents.\n"
PAIRS = 200_000_000  # rows x keys of one batched pass: bounds the memory of its mask


@dataclass
class Prompt:
    """ids [T] of system, documents, question and gold answer; ``segment`` [T]: 0 system, 1.. documents, -1 question and answer."""

    ids: torch.Tensor
    segment: torch.Tensor
    question: int  # position of the question's first token
    answer: int  # position of the token whose logits give the answer's first token
    stops: torch.Tensor  # ids of tokens that end a sentence

    @property
    def documents(self) -> int:
        return int(self.segment.max())


class Reader:
    def __init__(self, folder: Path, device: torch.device) -> None:
        self.tokenizer, self.device = Tokenizer.from_file(str(folder / "tokenizer.json")), device
        vocabulary = self.tokenizer.get_vocab()
        stops = sorted(i for i in vocabulary.values() if ends_sentence(self.tokenizer.decode([i])))
        self.stops = torch.tensor(stops).to(device)

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def document(self, title: str, text: str) -> list[int]:
        return self.ids(f"<|doc|>{title}\n{text}\n")

    def prompt(self, row: dict[str, Any]) -> Prompt:
        parts = [self.ids(SYSTEM), *(self.document(*d) for d in row["docs"])]
        segment = [i for i, part in enumerate(parts) for _ in part]
        tail = self.ids(f"<|question|>{row['question']}\n<|answer|>")
        gold = [*self.ids(" " + row["answers"][0]), 2]
        ids = [token for part in parts for token in part] + tail + gold
        segment += [-1] * (len(tail) + len(gold))
        start = segment.index(-1)
        return Prompt(torch.tensor(ids).to(self.device), torch.tensor(segment).to(self.device), start, start + len(tail) - 1, self.stops)

    def foreign(self, row: dict[str, Any], tokens: int) -> torch.Tensor:
        """The first ``tokens`` tokens of a row's documents, behind the system text."""
        ids = self.ids(SYSTEM)
        for d in row["docs"]:
            ids += self.document(*d)
        return torch.tensor(ids[:tokens]).to(self.device)

    def texts(self, file: Path, tokens: int) -> dict[str, torch.Tensor]:
        """The first ``tokens`` tokens of each text of a file, as they are and as documents behind the system text.

        Lines of ==== stand between texts; a text's passages have a blank line between them and begin with their title.
        """
        parts = [text.strip() for text in file.read_text(encoding="utf-8").split("\n====\n")]
        if len(parts) != 2:
            raise SystemExit(f"{file} holds {len(parts)} texts, not two with a line of ==== between them")
        found = {f"text {i}": self.ids(part) for i, part in enumerate(parts)}
        for i, part in enumerate(parts):
            passages = [passage.partition("\n") for passage in part.split("\n\n")]
            documents = [self.document(title, text) for title, _, text in passages]
            found[f"documents {i}"] = [*self.ids(SYSTEM), *(token for document in documents for token in document)]
        return {name: torch.tensor(ids[:tokens]).to(self.device) for name, ids in found.items()}


def rows_of(folder: Path, name: str) -> list[dict[str, Any]]:
    with gzip.open(folder / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def ends_sentence(text: str) -> bool:
    """Whether a token that reads ``text`` is the last one of a sentence."""
    return "\n" in text or text.rstrip().rstrip("\"'”’)]").endswith((".", "!", "?", "。", "！", "？"))


class Documents:
    """The prompt's segments as one padded batch: [D, n] token ids, and the way from there back to [T]."""

    def __init__(self, prompt: Prompt) -> None:
        parts = [(prompt.segment == i).nonzero()[:, 0] for i in range(prompt.documents + 1)]
        self.length = max(len(p) for p in parts)
        self.ids = torch.stack([torch.nn.functional.pad(prompt.ids[p], (0, self.length - len(p))) for p in parts])
        self.starts = torch.stack([p[0] for p in parts])
        self.lengths = torch.tensor([len(p) for p in parts], device=prompt.ids.device)
        self.valid = torch.arange(self.length, device=prompt.ids.device)[None] < self.lengths[:, None]


@dataclass
class Foreign:
    cache: Cache
    positions: torch.Tensor


@torch.no_grad()
def ingest(model: Llama, prompt: Prompt, contexts: Sequence[Foreign]) -> tuple[Cache, dict[str, torch.Tensor]]:
    """K and V of the documents, each computed alone, and what a server could store with them; [.., T'] over system and documents.

    sv, sk [contexts, layers, T']: squared deviation of values and keys behind each foreign context; mass [contexts, layers, heads, T']:
    attention to it; norm [layers, T']: squared norm of the values.
    """
    documents = Documents(prompt)
    steps = torch.arange(documents.length, device=model.device)[None]
    alone = model.prefill(documents.ids, steps.expand(len(documents.ids), -1))

    def flat(cache: Cache) -> Cache:  # -> [layers, 1, kv_heads, T', d]
        return Cache(*(x.transpose(2, 3)[:, documents.valid].transpose(1, 2)[:, None] for x in (cache.k, cache.v)))

    cache, room = flat(alone), len(prompt.ids) - prompt.question
    sv, sk, mass = [], [], []
    for context in contexts:
        share: list[torch.Tensor] = []
        n = context.positions.shape[1]
        behind = flat(model.prefill(documents.ids, steps + n, context.cache, context.positions, share))
        sv.append((behind.v - cache.v).square().sum((1, 2, 4)))
        sk.append((behind.k - cache.k).square().sum((1, 2, 4)))
        mass.append(torch.stack(share).transpose(2, 3)[:, documents.valid].transpose(1, 2))
    features = {"sv": torch.stack(sv), "sk": torch.stack(sk), "mass": torch.stack(mass), "norm": cache.v.square().sum((1, 2, 4))}
    wide = Cache(*(torch.nn.functional.pad(x, (0, 0, 0, room)) for x in (cache.k, cache.v)))  # zeros where the question will stand
    return wide, features


@dataclass
class Outcome:
    """One recomputed variant: every gold token most likely, mean log probability of the gold tokens, KL of the first against `full`."""

    right: bool
    score: float
    kl: float


@torch.no_grad()
def outcomes(
    model: Llama, prompt: Prompt, cache: Cache, choices: torch.Tensor, reference: torch.Tensor | None = None
) -> tuple[list[Outcome], torch.Tensor]:
    """Answers over ``cache`` with the tokens ``choices`` [B, R] recomputed; and the first answer token's log probabilities [B, vocab]."""
    total = len(prompt.ids)
    tail = torch.arange(prompt.question, total - 1, device=model.device)
    gold = prompt.ids[prompt.answer + 1 :]
    found: list[Outcome] = []
    firsts = []
    rows = choices.shape[1] + len(tail)
    step = max(1, int(PAIRS // (rows * total)))
    for part in choices.split(step):
        hidden, _ = model.rows(prompt.ids, torch.cat((part, tail.expand(len(part), -1)), 1), cache)
        logp = model.logits(hidden[:, -len(gold) :]).log_softmax(-1)
        right = (logp.argmax(-1) == gold).all(-1)
        score = logp.gather(-1, gold[None, :, None].expand(len(part), -1, 1))[..., 0].mean(-1)
        firsts.append(logp[:, 0])
        base = logp[:, 0] if reference is None else reference.expand(len(part), -1)
        kl = (base.exp() * (base - logp[:, 0])).sum(-1)
        found += [Outcome(bool(r), float(s), float(d)) for r, s, d in zip(right.tolist(), score.tolist(), kl.tolist(), strict=True)]
    return found, torch.cat(firsts)
