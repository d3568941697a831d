"""Which prefix should documents be prefilled behind? Emulates reuse of documents' KV in transformers.

    python -m benchmarks.document_prefixes run MODEL OUT.json SET.jsonl[.gz] ... [--half first] [--shard 0/4]
    python -m benchmarks.document_prefixes table OUT.json ... [--report REPORT.json]

A document's KV is computed behind a prefix that is dropped afterwards; its keys are rotated to the document's
place in the prompt. Then the tokens that the question attends to most (rule `question`) are recomputed over
the whole context, and the answer is decoded greedily, 24 tokens at most. All variants of a question have the
same number of tokens, so that they are decoded as one batch. With everything recomputed the emulation is
exact: variant `check` must answer as `full` does.

Qwen2 and Llama families. Questions are lines {id, question, answers, ctxs: [{title, text}]}.
"""

from __future__ import annotations

import argparse
import collections
import gzip
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.paired import difference
from ragserve.verification.metrics import contains_answer, exact_match, token_f1

SYSTEM = (
    "Answer the question from the documents. Write the answer alone, in as few words as possible, "
    "without a sentence around it."
)
TOKENS = 24
Layers = list[tuple[torch.Tensor, torch.Tensor]]
"""K and V of each layer, [batch, kv_heads, tokens, head_dim]."""


@dataclass(frozen=True)
class Question:
    """One question with its documents as token ids."""

    name: str
    number: int
    documents: list[list[int]]
    ids: list[int]
    answers: list[str]


class Reader:
    """A model, and the passes of which the emulation consists."""

    def __init__(self, folder: str) -> None:
        sys.modules.setdefault("torchvision", None)  # one that does not fit torch fails at import
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.bfloat16 if self.device == "cuda" else torch.float32,
            attn_implementation="eager",
        )
        self.model.to(self.device).eval()
        self.head = self.ids(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\nDocuments:\n\n")
        ends = self.tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
        self.ends = {self.tokenizer.eos_token_id, *ends}

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def document(self, context: dict[str, str]) -> list[int]:
        return self.ids(f"### {context.get('title') or 'Document'}\n{context['text'].strip()}\n\n")

    def question(self, name: str, number: int, row: dict[str, Any]) -> Question:
        documents = [self.document(context) for context in row["ctxs"]]
        ids = self.ids(f"Question: {row['question']}<|im_end|>\n<|im_start|>assistant\n")
        return Question(name, number, documents, ids, row["answers"])

    @torch.no_grad()
    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        past: Layers | None = None,
        mask: torch.Tensor | None = None,
        *,
        attentions: bool = False,
    ) -> tuple[Any, Layers]:
        """Run ``ids`` [batch, n] at ``positions`` behind ``past``; the output, and all K and V."""
        from transformers import DynamicCache

        cache = DynamicCache()
        for layer, (k, v) in enumerate(past or []):
            cache.update(k, v, layer)
        output = self.model(
            input_ids=ids,
            position_ids=positions,
            past_key_values=cache,
            attention_mask=mask,
            use_cache=True,
            output_attentions=attentions,
            logits_to_keep=1,
        )
        return output, [(layer.keys, layer.values) for layer in output.past_key_values.layers]

    def rotated(self, k: torch.Tensor, by: int) -> torch.Tensor:
        """Rotate keys [..., n, head_dim] by a number of positions."""
        x = k.float()
        cos, sin = self.model.model.rotary_emb(x, torch.tensor([[abs(by)]], device=k.device))
        half = x.shape[-1] // 2
        turned = torch.cat((-x[..., half:], x[..., :half]), -1)
        return (x * cos + turned * (sin if by >= 0 else -sin)).to(k.dtype)

    def tensor(self, ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(ids, device=self.device)

    def alone(self, ids: Sequence[int]) -> Layers:
        """K and V of a text from position 0 on."""
        return self.forward(self.tensor(ids)[None], torch.arange(len(ids), device=self.device)[None])[1]

    def documents_behind(self, prefix: Layers | None, documents: Sequence[Sequence[int]]) -> list[Layers]:
        """K and V of each document behind the prefix, at positions from the prefix's length on."""
        before = prefix[0][0].shape[2] if prefix else 0
        longest, count = max(map(len, documents)), len(documents)
        ids = self.tensor([[*ids, *[0] * (longest - len(ids))] for ids in documents])
        places = torch.arange(before, before + longest, device=self.device).expand(count, -1)
        past = [(k.expand(count, -1, -1, -1), v.expand(count, -1, -1, -1)) for k, v in prefix or []]
        _, layers = self.forward(ids, places, past or None)
        return [
            [
                (k[i : i + 1, :, before : before + len(d)], v[i : i + 1, :, before : before + len(d)])
                for k, v in layers
            ]
            for i, d in enumerate(documents)
        ]

    def decode(self, logits: torch.Tensor, past: Layers, position: int) -> list[str]:
        """Continue each row greedily from its ``logits`` [batch, vocabulary]."""
        found: list[list[int]] = [[] for _ in logits]
        live = set(range(len(found)))
        for _ in range(TOKENS + 1):
            tokens = logits.argmax(-1).tolist()
            live -= {row for row in live if tokens[row] in self.ends or len(found[row]) == TOKENS}
            for row in live:
                found[row].append(tokens[row])
            if not live:
                break
            at = torch.full((len(tokens), 1), position, device=self.device)
            output, past = self.forward(self.tensor(tokens)[:, None], at, past)
            logits, position = output.logits[:, -1], position + 1
        return [self.tokenizer.decode(ids).strip() for ids in found]


def prefixes(reader: Reader, contexts: Sequence[dict[str, str]]) -> dict[str, list[int]]:
    """The prefixes to choose from, by name. ``contexts``: passages of the namespace, of another question."""
    text = files("sglang_ext.analysis").joinpath("unrelated_contexts.txt").read_text(encoding="utf-8")
    first, second = (reader.ids(part.strip()) for part in text.split("\n====\n"))
    passages = [token for context in contexts for token in reader.document(context)][:512]
    return {
        "alone": [],
        "head": reader.head,
        "fixed 128": first[:128],
        "fixed 256": first[:256],
        "fixed 512": first[:512],
        "fixed 1024": (first + second)[:1024],
        "other fixed 512": second[:512],
        "head + fixed 512": reader.head + first[:512],
        "passages 512": passages,
        "head + passages 512": reader.head + passages,
    }


def joined(
    layers: Sequence[tuple[torch.Tensor, torch.Tensor]], dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of several parts as one."""
    k, v = zip(*layers, strict=True)
    return torch.cat(k, dim), torch.cat(v, dim)


class Emulation:
    """Answers questions from documents' KV that was computed behind each of several prefixes."""

    def __init__(self, reader: Reader, given: dict[str, list[int]], shares: Sequence[float]) -> None:
        self.reader, self.shares = reader, shares
        self.names = list(given)
        self._prefixes = [reader.alone(ids) if ids else None for ids in given.values()]
        self._head = reader.alone(reader.head)

    def _composed(self, question: Question) -> Layers:
        """The prompt's KV up to the question, one row a prefix."""
        rows = []
        for prefix in self._prefixes:
            at, before = len(self.reader.head), prefix[0][0].shape[2] if prefix else 0
            parts = [self._head]
            for document, layers in zip(
                question.documents, self.reader.documents_behind(prefix, question.documents), strict=True
            ):
                parts.append([(self.reader.rotated(k, at - before), v) for k, v in layers])
                at += len(document)
            rows.append(
                [
                    tuple(torch.cat(own, 2) for own in zip(*layer, strict=True))
                    for layer in zip(*parts, strict=True)
                ]
            )
        return [
            (torch.cat([row[n][0] for row in rows]), torch.cat([row[n][1] for row in rows]))
            for n in range(len(rows[0]))
        ]

    def _attended(self, output: Any, tokens: int) -> torch.Tensor:
        """What each row's last token attends to: largest of the heads, summed over the upper layers."""
        layers = output.attentions
        upper = layers[len(layers) // 2 :]
        return torch.stack([layer[:, :, -1, :tokens].float().amax(1) for layer in upper]).sum(0)

    def _recomputed(
        self, past: Layers, chosen: torch.Tensor, prompt: torch.Tensor, question: Question
    ) -> tuple[torch.Tensor, Layers]:
        """Compute the chosen positions [batch, n] and the question anew over the rest: logits, KV."""
        count, tokens = len(chosen), past[0][0].shape[2]
        kept = torch.ones(count, tokens, dtype=torch.bool, device=chosen.device).scatter_(1, chosen, False)
        rest = kept.nonzero()[:, 1].view(count, -1)
        at = rest[:, None, :, None].expand(-1, past[0][0].shape[1], -1, past[0][0].shape[3])
        base = [(k.gather(2, at), v.gather(2, at)) for k, v in past]
        own = torch.arange(tokens, tokens + len(question.ids), device=chosen.device).expand(count, -1)
        rows = torch.cat((chosen, own), 1)
        ids = torch.cat((prompt[chosen], self.reader.tensor(question.ids).expand(count, -1)), 1)
        keys = torch.cat((rest, rows), 1)
        mask = torch.zeros(
            count, 1, rows.shape[1], keys.shape[1], dtype=base[0][0].dtype, device=chosen.device
        )
        hidden = keys[:, None, None, :] > rows[:, None, :, None]
        mask.masked_fill_(hidden, torch.finfo(mask.dtype).min)
        output, layers = self.reader.forward(ids, rows, base, mask)
        return output.logits[:, -1], layers

    @torch.no_grad()
    def answers(self, question: Question) -> Iterator[tuple[str, float, str]]:
        """Variant, share recomputed and answer: `full`, `check`, then each prefix with each share."""
        reader, first = self.reader, len(self.reader.head)
        prompt = reader.tensor([*reader.head, *(token for d in question.documents for token in d)])
        tokens, asked = len(prompt), reader.tensor(question.ids)
        places = torch.arange(tokens + len(asked), device=prompt.device)
        full, layers = reader.forward(torch.cat((prompt, asked))[None], places[None])
        past = self._composed(question)
        count = len(self.names)
        output, extended = reader.forward(
            asked.expand(count, -1), places[tokens:].expand(count, -1), past, attentions=True
        )
        score = self._attended(output, tokens)
        score[:, :first] = -1.0
        labels, logits, caches = [("full", 1.0)], [full.logits[:, -1]], [layers]
        for share in self.shares:
            labels += [(name, share) for name in self.names]
            if not share:
                logits.append(output.logits[:, -1])
                caches.append(extended)
                continue
            chosen = score.topk(max(1, round(share * (tokens - first)))).indices.sort().values
            made, own = self._recomputed(past, chosen, prompt, question)
            logits.append(made)
            caches.append(own)
        everything = torch.arange(first, tokens, device=prompt.device)[None]
        made, own = self._recomputed([(k[:1], v[:1]) for k, v in past], everything, prompt, question)
        labels, logits, caches = [*labels, ("check", 1.0)], [*logits, made], [*caches, own]
        del past, output, extended
        batch = []
        for layer in range(len(caches[0])):
            batch.append(joined([cache[layer] for cache in caches], 0))
            for cache in caches:
                cache[layer] = batch[0]  # frees it as soon as it is joined
        found = reader.decode(torch.cat(logits), batch, tokens + len(asked))
        for (name, share), answer in zip(labels, found, strict=True):
            yield name, share, answer


def rows_of(path: Path, half: str) -> list[tuple[int, dict[str, Any]]]:
    """The numbered questions of a set's half, by position."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        rows = list(enumerate(map(json.loads, file)))
    middle = (len(rows) + 1) // 2
    return {"first": rows[:middle], "second": rows[middle:], "all": rows}[half]


def in_turns(sets: dict[str, list[tuple[int, dict[str, Any]]]], shard: str) -> list[tuple[str, int, Any]]:
    """Set, number and row of the questions of a ``shard`` (k/n), the sets in turns."""
    own, shards = map(int, shard.split("/"))
    return [
        (name, *rows[at])
        for at in range(own, max(map(len, sets.values())), shards)
        for name, rows in sets.items()
        if at < len(rows)
    ]


def scored(question: Question, answer: str, **named: Any) -> dict[str, Any]:
    """The row of an answer. ``named``: by what it was found."""
    return {
        "set": question.name,
        "question": question.number,
        **named,
        "answer": answer,
        "f1": token_f1(answer, question.answers),
        "em": exact_match(answer, question.answers),
        "contains": contains_answer(answer, question.answers),
    }


def write_answers(args: argparse.Namespace, started: float, rows: list[dict[str, Any]]) -> None:
    """Write a run's rows with its model, machine and versions."""
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    versions = {"torch": torch.__version__, "transformers": __import__("transformers").__version__}
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "gpu": where}
    report = {"model": Path(args.model).name, "half": args.half, "machine": machine, "versions": versions}
    args.out.write_text(json.dumps({**report, "seconds": time.monotonic() - started, "rows": rows}))


def run(args: argparse.Namespace) -> None:
    """Answer every question of the shard that the time allows, and write the answers."""
    started, reader = time.monotonic(), Reader(args.model)
    sets = {path.name.split(".")[0]: rows_of(path, args.half)[: args.limit] for path in args.sets}
    emulations: dict[str, Emulation] = {}
    for name, rows in sets.items():
        given = prefixes(reader, rows[-1][1]["ctxs"])
        chosen = {key: given[key] for key in args.prefixes.split(",")} if args.prefixes else given
        emulations[name] = Emulation(reader, chosen, [float(share) for share in args.shares.split(",")])
    found = []
    for name, number, row in in_turns(sets, args.shard):
        if time.monotonic() - started > args.seconds:
            break
        question = reader.question(name, number, row)
        for variant, share, answer in emulations[name].answers(question):
            found.append(scored(question, answer, variant=variant, recomputed=share))
    write_answers(args, started, found)


def table(
    paths: Sequence[Path], by: tuple[str, str] = ("variant", "recomputed"), reference: str = "full"
) -> list[dict[str, Any]]:
    """A row by the two fields ``by``: mean F1 over all questions, the paired difference from ``reference``
    with its 95 % interval, sets counting alike, and the differences by set."""
    found: dict[tuple[str, float], dict[tuple[str, int], float]] = collections.defaultdict(dict)
    for path in paths:
        for row in json.loads(path.read_text())["rows"]:
            found[row[by[0]], row[by[1]]][row["set"], row["question"]] = 100 * row["f1"]
    names = ("prefix", by[1]) if by[0] == "variant" else by
    rows = []
    for key, f1 in found.items():
        row = dict(zip(names, key, strict=True)) | {"n": len(f1.keys() & found[reference, 1.0].keys())}
        row["f1"] = round(statistics.fmean(f1.values()), 1)
        rows.append(row | difference(f1, found[reference, 1.0]))
    return rows


def show(args: argparse.Namespace) -> None:
    """Print the table, and write it as a report of the machine that answered."""
    show_rows(args, table(args.files), "Documents' prefixes")


def show_rows(args: argparse.Namespace, rows: list[dict[str, Any]], name: str, **workload: Any) -> None:
    """Print rows, and write them as the report ``name`` of the machine that answered."""
    first = json.loads(args.files[0].read_text())
    for row in rows:
        print(json.dumps(row))
    if args.report is None:
        return
    half = "all questions" if first["half"] == "all" else f"{first['half']} halves of the sets"
    made_by = {"model": first["model"], "questions": half, "tokens": TOKENS, "engine": "emulation"}
    report = {
        "name": name,
        "workload": made_by | workload,
        "environment": {**first["machine"], "versions": first["versions"], "date": args.date},
        "rows": rows,
    }
    args.report.write_text(json.dumps(report, indent=1) + "\n")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(required=True)
    asked = commands.add_parser("run")
    asked.add_argument("model")
    asked.add_argument("out", type=Path)
    asked.add_argument("sets", type=Path, nargs="+")
    asked.add_argument("--half", choices=("first", "second", "all"), default="first")
    asked.add_argument("--limit", type=int, default=10**6, help="questions of a set")
    asked.add_argument("--seconds", type=float, default=1e9)
    asked.add_argument("--shard", default="0/1", help="k/n: every n-th question, from the k-th on")
    asked.add_argument("--prefixes", default="", help="names, separated by commas; all without it")
    asked.add_argument("--shares", default="0,0.02,0.05,0.1,0.15,0.2")
    asked.set_defaults(do=run)
    shown = commands.add_parser("table")
    shown.add_argument("files", type=Path, nargs="+")
    shown.add_argument("--report", type=Path)
    shown.add_argument("--date", default=time.strftime("%Y-%m-%d"))
    shown.set_defaults(do=show)
    args = parser.parse_args()
    args.do(args)


if __name__ == "__main__":
    main()
