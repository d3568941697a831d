"""Which tokens of the best passages should be computed again? Emulates rules in transformers.

    python -m benchmarks.recompute_rules run MODEL OUT.json SET.jsonl[.gz] ... --embedder FOLDER
        [--half first] [--shard 0/4] [--keep 0.25] [--rules question,spans,...] [--shares 0.1,0.2]
    python -m benchmarks.recompute_rules table OUT.json ... [--report REPORT.json]

The best passages of a question (strategy `passages`, option `keep`) are composed from KV that was computed
behind the documents' prefix, as `benchmarks.document_prefixes` does it for all passages. Then a rule chooses
tokens to compute again. Rows: `full` (all passages), `exact` (the same passages, prefilled), `none`, and each
rule with each share of the kept tokens. Rules, with what they read of the question's attention (the largest
of the heads, summed over the upper half of the layers):

    question   the tokens that the question's last token attends to most (ProphetKV)
    asked      the same, mean over all tokens of the question
    spans      the same as `question`, smoothed over nine neighbours: whole spans (SpecCache)
    sentences  the sentences with the highest attention a token
    first      the first four tokens of each passage, then `question`
    twice      half of the tokens by `question`; the others after these are computed and the question asked
               anew
    shift      `question`, then the mean change of K and V of a passage's computed tokens is added to its
               others (AgentKVShift), and the question is asked anew
    shift_v    the same of V alone
    sharp N    `question`, over passages whose keys are N times as long: the question attends more sharply to
               what many passages say at once (the temperature of APE); also with nothing recomputed
    random     the same number at random"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.document_prefixes import (
    Emulation,
    Layers,
    Question,
    Reader,
    in_turns,
    joined,
    prefixes,
    rows_of,
    scored,
    show_rows,
    table,
    write_answers,
)
from ragserve.best_passages import PassagesOptions

RULES = ("question", "asked", "spans", "sentences", "first", "twice", "shift", "shift_v", "random")
RULES += ("sharp 1.1", "sharp 1.25")
FIRST = 4
SMOOTHED = 9


class Rules(Emulation):
    """Composes the chosen passages once a question, and answers by every rule."""

    def __init__(self, reader: Reader, prefix: list[int], rules: Sequence[str], shares: Sequence[float]):
        super().__init__(reader, {"fixed 512": prefix}, shares)
        self.rules = rules

    def _turned(self, k: torch.Tensor, by: torch.Tensor, sign: int) -> torch.Tensor:
        """Rotate keys [batch, heads, n, head_dim] by ``sign`` times the positions ``by`` [batch, n]."""
        x = k.float()
        cos, sin = self.reader.model.model.rotary_emb(x, by)
        half = x.shape[-1] // 2
        turned = torch.cat((-x[..., half:], x[..., :half]), -1)
        return x * cos[:, None] + sign * turned * sin[:, None]

    def _ask(self, past: Layers, question: Question, tokens: int) -> tuple[Any, Layers]:
        count = len(past[0][0])
        asked = self.reader.tensor(question.ids).expand(count, -1)
        places = torch.arange(tokens, tokens + asked.shape[1], device=asked.device).expand(count, -1)
        return self.reader.forward(asked, places, past, attentions=True)

    def _scores(self, output: Any, tokens: int, first: int) -> dict[str, torch.Tensor]:
        """Scores [1, tokens] by rule, of the rules that choose by the question's attention."""
        layers = output.attentions[len(output.attentions) // 2 :]
        last = torch.stack([layer[:, :, -1, :tokens].float().amax(1) for layer in layers]).sum(0)
        mean = torch.stack([layer[:, :, :, :tokens].float().mean(2).amax(1) for layer in layers]).sum(0)
        smooth = torch.nn.functional.avg_pool1d(last[:, None], SMOOTHED, 1, SMOOTHED // 2)[:, 0]
        found = {"question": last, "asked": mean, "spans": smooth}
        for score in found.values():
            score[:, :first] = -1.0
        return found

    def _sentences(self, question: Question, first: int) -> list[list[int]]:
        """Positions of each sentence."""
        found: list[list[int]] = []
        at = first
        for document in question.documents:
            begin = at
            for number, token in enumerate(document):
                text = self.reader.tokenizer.decode([token])
                if "\n" in text or text.endswith((".", "!", "?")) or number == len(document) - 1:
                    found.append(list(range(begin, at + number + 1)))
                    begin = at + number + 1
            at += len(document)
        return [each for each in found if each]

    def _choices(
        self, scores: dict[str, torch.Tensor], question: Question, first: int, tokens: int, count: int
    ) -> dict[str, torch.Tensor]:
        """Positions [1, count] by rule, ascending."""
        device = scores["question"].device
        found = {rule: score.topk(count).indices for rule, score in scores.items()}
        last = scores["question"][0]
        sentences = self._sentences(question, first)
        sentences.sort(key=lambda each: -float(last[each].mean()))
        flat = [place for each in sentences for place in each][:count]
        found["sentences"] = torch.tensor([flat], device=device)
        boosted = last.clone()
        at = first
        for document in question.documents:
            boosted[at : at + min(FIRST, len(document))] += 1e6
            at += len(document)
        found["first"] = boosted[None].topk(count).indices
        draw = random.Random(question.number)
        places = draw.sample(range(first, tokens), count)
        found["random"] = torch.tensor([places], device=device)
        return {rule: found[rule].sort().values for rule in found}

    def _shifted(self, past: Layers, layers: Layers, chosen: torch.Tensor, question: Question, first: int):
        """KV of the context with the chosen tokens as computed, and with the mean change of each passage's K
        and V added to its others; two forms as two rows: K and V, V alone."""
        tokens, n = past[0][0].shape[2], chosen.shape[1]
        asked = len(question.ids)
        places = torch.arange(tokens, device=chosen.device)[None]
        owner = torch.full((tokens,), -1, device=chosen.device)
        at = first
        for number, document in enumerate(question.documents):
            owner[at : at + len(document)] = number
            at += len(document)
        is_chosen = torch.zeros(tokens, dtype=torch.bool, device=chosen.device)
        is_chosen[chosen[0]] = True
        made = []
        for (k, v), (new_k, new_v) in zip(past, layers, strict=True):
            own_k, own_v = new_k[:, :, -asked - n : -asked], new_v[:, :, -asked - n : -asked]
            k, v = k[:1].clone(), v[:1].clone()
            flat, flat_new = self._turned(k, places, -1), self._turned(own_k, chosen, -1)
            shifted_k, shifted_v = flat.clone(), v.float().clone()
            for number in range(len(question.documents)):
                mine = owner[chosen[0]] == number
                if not mine.any():
                    continue
                others = (owner == number) & ~is_chosen
                moved_k = (flat_new[:, :, mine] - flat[:, :, chosen[0][mine]]).mean(2, keepdim=True)
                moved_v = (own_v[:, :, mine] - v[:, :, chosen[0][mine]]).float().mean(2, keepdim=True)
                shifted_k[:, :, others] += moved_k
                shifted_v[:, :, others] += moved_v
            rotated = self._turned(shifted_k, places, 1).to(k.dtype)
            k[:, :, chosen[0]], rotated[:, :, chosen[0]] = own_k, own_k
            shifted = shifted_v.to(v.dtype)
            shifted[:, :, chosen[0]] = own_v
            made.append((torch.cat((rotated, k)), torch.cat((shifted, shifted))))
        return made

    @torch.no_grad()
    def ruled(self, question: Question) -> list[tuple[str, float, str]]:
        """Rule, share and answer, over the passages of ``question``, which are those chosen."""
        reader, first = self.reader, len(self.reader.head)
        prompt = reader.tensor([*reader.head, *(token for d in question.documents for token in d)])
        tokens, asked = len(prompt), reader.tensor(question.ids)
        places = torch.arange(tokens + len(asked), device=prompt.device)
        exact, layers = reader.forward(torch.cat((prompt, asked))[None], places[None])
        past = self._composed(question)
        output, extended = self._ask(past, question, tokens)
        scores = self._scores(output, tokens, first)
        labels = [("exact", 1.0), ("none", 0.0)]
        logits, caches = [exact.logits[:, -1], output.logits[:, -1]], [layers, extended]
        del output

        def add(rule: str, share: float, made: torch.Tensor, own: Layers) -> None:
            labels.append((rule, share))
            logits.append(made)
            caches.append([(k.clone(), v.clone()) for k, v in own])

        sharper = {}
        for rule in self.rules:
            if rule.startswith("sharp "):
                sharper[rule] = _sharper(past, first, float(rule.split()[1]))
                asked_again, own = self._ask(sharper[rule], question, tokens)
                add(rule, 0.0, asked_again.logits[:, -1], own)
        for share in self.shares:
            count = max(2, round(share * (tokens - first)))
            choices = self._choices(scores, question, first, tokens, count)
            plain = [rule for rule in self.rules if rule in choices]
            for rule in plain:
                made, own = self._recomputed(past, choices[rule], prompt, question)
                add(rule, share, made, own)
                if rule == "question" and {"shift", "shift_v"} & set(self.rules):
                    shifted = self._shifted(past, own, choices[rule], question, first)
                    asked_again, longer = self._ask(shifted, question, tokens)
                    for row, name in enumerate(("shift", "shift_v")):
                        if name in self.rules:
                            one = [(k[row : row + 1], v[row : row + 1]) for k, v in longer]
                            add(name, share, asked_again.logits[row : row + 1, -1], one)
            for rule, scaled in sharper.items():
                made, own = self._recomputed(scaled, choices["question"], prompt, question)
                add(rule, share, made, own)
            if "twice" in self.rules:
                half = scores["question"].topk(count // 2).indices.sort().values
                _, own = self._recomputed(past, half, prompt, question)
                order = torch.cat((self._rest(half, tokens), half), 1).argsort()[0]
                changed = [(k[:, :, order], v[:, :, order]) for k, v in own]
                again, _ = self._ask(changed, question, tokens)
                score = self._scores(again, tokens, first)["question"].scatter(1, half, 1e6)
                chosen = score.topk(count).indices.sort().values
                made, own = self._recomputed(past, chosen, prompt, question)
                add("twice", share, made, own)
        batch = []
        for layer in range(len(caches[0])):
            batch.append(joined([cache[layer] for cache in caches], 0))
            for cache in caches:
                cache[layer] = batch[0]  # frees it as soon as it is joined
        answers = reader.decode(torch.cat(logits), batch, tokens + len(asked))
        return [(*label, answer) for label, answer in zip(labels, answers, strict=True)]

    def _rest(self, chosen: torch.Tensor, tokens: int) -> torch.Tensor:
        kept = torch.ones(1, tokens, dtype=torch.bool, device=chosen.device).scatter_(1, chosen, False)
        return kept.nonzero()[:, 1].view(1, -1)

    @torch.no_grad()
    def full(self, question: Question) -> str:
        """The answer over all passages, prefilled."""
        reader = self.reader
        ids = reader.tensor([*reader.head, *(t for d in question.documents for t in d), *question.ids])
        output, layers = reader.forward(ids[None], torch.arange(len(ids), device=ids.device)[None])
        return reader.decode(output.logits[:, -1], layers, len(ids))[0]


def _sharper(past: Layers, first: int, by: float) -> Layers:
    """KV whose keys from position ``first`` on are ``by`` times as long."""
    return [(torch.cat((k[:, :, :first], k[:, :, first:] * by), 2), v) for k, v in past]


class Chooser:
    """Chooses a question's best passages as strategy `passages` does, with an embedder's cosines."""

    def __init__(self, folder: str, keep: float) -> None:
        from sentence_transformers import SentenceTransformer

        self._model = SentenceTransformer(folder, device="cuda" if torch.cuda.is_available() else "cpu")
        self._options = PassagesOptions(keep=keep)

    def __call__(self, row: dict[str, Any], question: Question) -> Question:
        texts = [f"{c.get('title') or ''}\n{c['text']}" for c in row["ctxs"]]
        vectors = self._model.encode([row["question"], *texts], normalize_embeddings=True)
        cosines = vectors[1:] @ vectors[0]
        order = sorted(range(len(texts)), key=lambda i: -cosines[i])
        kept = self._options.chosen(
            row["question"],
            [(row["ctxs"][i].get("title") or "", row["ctxs"][i]["text"]) for i in order],
            [len(question.documents[i]) for i in order],
            [float(cosines[i]) for i in order],
        )
        numbers = sorted(order[i] for i in kept)
        return replace(question, documents=[question.documents[i] for i in numbers])


def run(args: argparse.Namespace) -> None:
    """Answer every question of the shard that the time allows, and write the answers."""
    started, reader = time.monotonic(), Reader(args.model)
    chooser = Chooser(args.embedder, args.keep)
    sets = {path.name.split(".")[0]: rows_of(path, args.half) for path in args.sets}
    prefix = prefixes(reader, [])["fixed 512"]
    rules = Rules(reader, prefix, args.rules.split(","), [float(share) for share in args.shares.split(",")])
    found = []
    for name, number, row in in_turns(sets, args.shard):
        if time.monotonic() - started > args.seconds:
            break
        question = reader.question(name, number, row)
        answers = [("full", 1.0, rules.full(question)), *rules.ruled(chooser(row, question))]
        found += [scored(question, answer, rule=rule, share=share) for rule, share, answer in answers]
    write_answers(args, started, found)
    print(len(found), "answers in", round(time.monotonic() - started), "s")


def show(args: argparse.Namespace) -> None:
    """Print the table, and write it as a report of the machine that answered."""
    rows = table(args.files, ("rule", "share"), "exact")
    show_rows(args, rows, "Recompute rules over the best passages", prefix="fixed 512")


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    asked = commands.add_parser("run")
    asked.add_argument("model")
    asked.add_argument("out", type=Path)
    asked.add_argument("sets", type=Path, nargs="+")
    asked.add_argument("--embedder", required=True)
    asked.add_argument("--half", choices=("first", "second", "all"), default="first")
    asked.add_argument("--keep", type=float, default=0.25)
    asked.add_argument("--seconds", type=float, default=1e9)
    asked.add_argument("--shard", default="0/1", help="k/n: every n-th question, from the k-th on")
    asked.add_argument("--rules", default=",".join(RULES))
    asked.add_argument("--shares", default="0.1,0.2")
    asked.set_defaults(do=run)
    shown = commands.add_parser("table")
    shown.add_argument("files", type=Path, nargs="+")
    shown.add_argument("--report", type=Path)
    shown.add_argument("--date", default=time.strftime("%Y-%m-%d"))
    shown.set_defaults(do=show)
    args = parser.parse_args()
    args.do(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
