"""What it costs to keep a part of the documents, cause by cause: F1 of answers, without the engine.

    python examples/kept_text.py --data crossdoc.jsonl.gz --work FOLDER [--limit 40] [--keep 0.25]
        [--seconds S] [--out FILE]

The kept sentences are those that `samkv` keeps, chosen by the engine's code with the attention of the
embedded model's retrieval head. The model reads them in plain PyTorch, float32. Each row changes one thing:

* what is kept: all, the chosen sentences, these with each document's title, whole documents;
* positions: those in the full prompt, or closed up;
* KV: of the whole prompt, of each document alone (what `concat` reuses), the latter with the best two thirds
  computed again as `samkv` does, or computed from the kept text alone, as if it were the prompt.

Rows are written to FOLDER as they come; the same command goes on where it stopped."""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from examples.models.recipe import architecture as model
from ragserve.answering.prompt import Prompt, PromptBuilder, PromptDocument, load_tokenizer
from ragserve.config import DEFAULT_MODEL
from ragserve.config import load as load_settings
from ragserve.eval.data import Question, interleaved, set_name
from ragserve.eval.data import load as load_questions
from ragserve.retrieval.embedder import Embedder
from ragserve.verification import report, rows
from ragserve.verification.given_scores import GivenScores
from ragserve.verification.metrics import contains_answer, token_f1
from ragserve.verification.sentence_choice import PromptSentences, SentenceChooser
from sglang_ext.analysis import retrieval_heads
from sglang_ext.analysis.texts import Texts
from sglang_ext.context.selection.sentences import SINKS
from sglang_ext.wire.request_options import SamKvOptions

OUT = Path(__file__).resolve().parent / "results" / "kept-text.json"
NEW_TOKENS, END = 24, 2
RECOMPUTED = 0.66  # of the kept tokens, as `samkv` has it
AGAIN = "documents alone, two thirds again"
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
        """The last token's logits [vocabulary], and the KV of ``past`` [P] and the new tokens. `queries` are
        the last token's then, [layers, heads, 64].

        ``ids``, ``places`` int64 [T]; ``seen`` bool [T, P + T]; None: those before."""
        x = F.embedding(ids, self._params["model.embed_tokens.weight"])
        cos, sin = (table[places] for table in self._table)
        found: Layers = []
        queries = []
        for i in range(self._layers):
            first, second = model.layer_weights(self._params, i)
            q, k, v = model.before_attention(x, *first, cos, sin)
            if past:
                k, v = torch.cat([past[i][0], k]), torch.cat([past[i][1], v])
            found.append((k, v))
            queries.append(q[-1])
            keys, values = (
                part.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(0, 1) for part in (k, v)
            )
            attended = F.scaled_dot_product_attention(
                q.transpose(0, 1), keys, values, attn_mask=seen, is_causal=seen is None
            )
            x = model.after_attention(x, attended.transpose(0, 1), *second)
        self.queries = torch.stack(queries)
        last = model.rms_norm(x[-1], self._params["model.norm.weight"])
        return F.linear(last, self._params["model.embed_tokens.weight"]), found

    def prefilled(self, ids: Sequence[int], first: int) -> Layers:
        """The KV of tokens from position ``first`` on, which see each other only."""
        return self.read(torch.tensor(ids), torch.arange(len(ids)) + first, [], None)[1]

    def shares(self, layers: Layers, query: torch.Tensor, hidden: Sequence[int]) -> torch.Tensor:
        """f32 [layers, KV heads, tokens]: the largest share of attention to each token's key that a query
        head of ``query`` [layers, heads, 64] gives it; none to tokens ``hidden``."""
        keys = torch.stack([k for k, _ in layers])
        grouped = query.unflatten(1, (keys.shape[2], -1))
        logits = torch.einsum("lhgd,lnhd->lhgn", grouped, keys) / keys.shape[-1] ** 0.5
        logits[..., list(hidden)] = -1e9
        return logits.softmax(-1).amax(2)

    def retrieval_head(self, texts: Sequence[Sequence[int]]) -> tuple[int, int]:
        """The layer and KV head that finds most of the texts' probes, as `retrieval_heads` does it."""
        hits = torch.zeros(self._layers, 1)
        for ids in texts:
            layers = self.prefilled(ids, 0)
            for start in retrieval_heads.probes(len(ids)):
                self.prefilled(ids[start : start + retrieval_heads.PROBE], len(ids))
                best = self.shares(layers, self.queries, range(SINKS)).argmax(-1)
                hits = hits + ((best >= start) & (best < start + retrieval_heads.PROBE + 4))
        layer, head = divmod(int(hits.flatten().argmax()), hits.shape[1])
        return layer, head

    def moved(self, layers: Layers, kept: torch.Tensor, by: torch.Tensor) -> Layers:
        """The KV of tokens ``kept`` int64 [K], each ``by`` int64 [K] positions earlier."""
        cos, sin = (table[by] for table in self._table)
        return [(model.rotate(k[kept], cos, -sin), v[kept]) for k, v in layers]

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


@dataclass(frozen=True, eq=False)
class Asked:
    """A question's prompt, read once: ``whole`` and ``apart`` are the KV of all tokens before the question,
    of the whole prompt, and of each document and the system text alone."""

    question: Question
    prompt: Prompt
    sentences: PromptSentences
    whole: Layers
    apart: Layers

    @classmethod
    def of(
        cls,
        reader: TorchReader,
        head: tuple[int, int],
        question: Question,
        prompt: Prompt,
        found: PromptSentences,
    ) -> Asked:
        end = prompt.spans[-1].end
        whole = reader.prefilled(prompt.input_ids[:end], 0)
        alone = [
            reader.prefilled(prompt.input_ids[span.start : span.end], span.start) for span in prompt.spans
        ]
        apart = [
            (torch.cat([k for k, _ in parts]), torch.cat([v for _, v in parts]))
            for parts in zip(*alone, strict=True)
        ]
        own = found.attended(attention(reader, head, prompt, apart, found))
        return cls(question, prompt, own, whole, apart)

    def answer(self, reader: TorchReader, variant: Variant, keep: float) -> list[int]:
        """The answer to the question behind the system text and the document tokens that are kept."""
        kept, kv, closed = variant.kept(self, keep), variant.kv, variant.closed
        end, ids = self.prompt.spans[-1].end, torch.tensor(self.prompt.input_ids)
        old = torch.tensor([*range(self.prompt.spans[0].end), *kept])
        new = torch.arange(len(old)) if closed else old
        asked = torch.arange(len(ids) - end) + (len(old) if closed else end)
        again = torch.zeros(len(old), dtype=torch.bool)
        if kv == "kept text":
            again[:] = True
        elif kv == AGAIN:
            again = torch.isin(old, torch.tensor(variant.kept(self, RECOMPUTED * keep)))
        layers = self.whole if kv == "whole prompt" else self.apart
        past = reader.moved(layers, old[~again], (old - new)[~again])
        rows, places = torch.cat([ids[old[again]], ids[end:]]), torch.cat([new[again], asked])
        return reader.answer(rows, places, past, new[~again])


def attention(
    reader: TorchReader, head: tuple[int, int], prompt: Prompt, apart: Layers, found: PromptSentences
) -> list[float]:
    """Signal `attention` of each sentence: the question reads the system text, then meets the documents'
    keys."""
    system, spans = prompt.spans[0].end, prompt.spans[1:]
    end, total = spans[-1].end, len(prompt.input_ids)
    past = [(k[:system], v[:system]) for k, v in apart]
    seen = torch.ones(total - end, system + total - end, dtype=torch.bool).tril(system)
    reader.read(torch.tensor(prompt.input_ids[end:]), torch.arange(end, total), past, seen)
    hidden = [*range(system), *(span.start + n for span in spans for n in range(SINKS))]
    share = reader.shares(apart, reader.queries, hidden)[head]
    best = torch.stack(
        [
            share[span.start + a : span.start + b].max()
            for span, own in zip(spans, found.bounds(), strict=True)
            for a, b in own
        ]
    )
    power: list[float] = (best / best.max()).sqrt().tolist()
    return power


def everything(asked: Asked, keep: float) -> list[int]:
    del keep
    return list(range(asked.prompt.spans[0].end, asked.prompt.spans[-1].end))


def choice(asked: Asked, keep: float) -> list[int]:
    """As `samkv` keeps by default."""
    return asked.sentences.positions(SamKvOptions(), [keep])[0]


def chosen_unaided(asked: Asked, keep: float) -> list[int]:
    """By words and attention alone."""
    options = {"experimental": {"retrieval_weight": 0.0, "feedback_weight": 0.0}}
    return asked.sentences.positions(SamKvOptions.model_validate(options), [keep])[0]


def chosen_apart(asked: Asked, keep: float) -> list[int]:
    """Every passage by its own score, whatever it continues."""
    options = {"experimental": {"continuation_weight": 0.0}}
    return asked.sentences.positions(SamKvOptions.model_validate(options), [keep])[0]


def with_titles(asked: Asked, keep: float) -> list[int]:
    """`chosen_apart`, and every document's first sentence."""
    titles = [
        span.start + token
        for span, own in zip(asked.prompt.spans[1:], asked.sentences.bounds(), strict=True)
        for token in range(*own[0])
    ]
    return sorted({*chosen_apart(asked, keep), *titles})


def whole_documents(asked: Asked, keep: float) -> list[int]:
    """The documents of which `chosen_apart` has the most tokens, whole, while they fit; one at least."""
    picked = chosen_apart(asked, keep)
    spans = asked.prompt.spans[1:]
    order = sorted(spans, key=lambda span: -sum(span.start <= place < span.end for place in picked))
    room, found = keep * asked.prompt.tokens_kept, []
    for number, span in enumerate(order):
        room -= span.end - span.start
        if number and room < 0:
            room += span.end - span.start
            continue
        found += range(span.start, span.end)
    return sorted(found)


def needed_too(asked: Asked, keep: float) -> list[int]:
    """`chosen_apart`, and the documents that hold an answer, each with the one before it, whole: no selector
    can know them."""
    spans, documents = asked.prompt.spans[1:], asked.question.documents
    holds = [contains_answer(document.text, asked.question.answers) for document in documents]
    pairs = [
        place
        for number, span in enumerate(spans)
        if holds[number] or holds[number + 1 : number + 2] == [True]
        for place in range(span.start, span.end)
    ]
    return sorted({*chosen_apart(asked, keep), *pairs})


@dataclass(frozen=True)
class Variant:
    """What is kept, of which KV, at positions that are closed up or not."""

    name: str
    kept: Callable[[Asked, float], list[int]]
    kv: str
    closed: bool

    @property
    def label(self) -> str:
        return f"{self.name}; {self.kv}; {'closed' if self.closed else 'original'}"


NO_LINK = "chosen, continuation_weight=0"
VARIANTS = (
    Variant("everything", everything, "whole prompt", False),
    Variant("everything", everything, "documents alone", False),
    Variant(NO_LINK, chosen_apart, "whole prompt", True),
    Variant(NO_LINK, chosen_apart, "documents alone", True),
    Variant(NO_LINK, chosen_apart, AGAIN, True),
    Variant(NO_LINK, chosen_apart, "kept text", False),
    Variant(NO_LINK, chosen_apart, "kept text", True),
    Variant("the same and all titles", with_titles, "kept text", True),
    Variant("the same without scores and feedback", chosen_unaided, "kept text", True),
    Variant("its documents whole", whole_documents, "kept text", True),
    Variant("the same and the documents needed", needed_too, "kept text", True),
    Variant("chosen", choice, "kept text", True),
)


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
    sets = {set_name(path): load_questions(path, given.limit) for path in given.data}
    with rows.appending(given.work / "rows-0.jsonl") as write:
        for name, question in interleaved(sets):
            if time.monotonic() > ends:
                break
            done = {strategy for own, one, strategy in known if (own, one) == (name, question.id)}
            for row in asked(name, question, done):
                write(row)


def main() -> int:
    parser = arguments(__doc__, 40, OUT)
    parser.add_argument("--keep", type=float, default=0.25, help="share of the document tokens")
    given, measurement = parser.parse_args(), Measurement()

    def asked(name: str, question: Question, done: set[str]) -> Iterator[rows.Row]:
        left = [each for each in VARIANTS if each.label not in done]
        return measurement.rows(name, question, given.keep, left) if left else iter(())

    write_rows(given, asked)
    report.write(
        "kept-text",
        {"model": "ragserve-tiny", "questions": f"at most {given.limit} a set", "kept": given.keep},
        list(table(rows.read(given.work))),
        out=given.out,
        note="f1: percent; below_full: points below everything kept of the whole prompt's KV, +- its "
        "standard error. kept: percent of the document tokens; answer kept: percent of questions. Plain "
        "PyTorch, float32, greedy.",
    )
    return 0


class Measurement:
    """Asks questions under all variants."""

    def __init__(self) -> None:
        self._reader, self._tokenizer = TorchReader(Path(DEFAULT_MODEL)), load_tokenizer(DEFAULT_MODEL)
        self._embedder, self._sentence_bytes = Embedder(), load_settings().sentence_bytes
        self._builder, self._chooser = PromptBuilder(self._tokenizer), SentenceChooser(self._tokenizer)
        unrelated = Texts.of(self._tokenizer, len(self._tokenizer)).unrelated
        self._head = self._reader.retrieval_head(unrelated)

    def rows(
        self, name: str, question: Question, keep: float, variants: Sequence[Variant]
    ) -> Iterator[rows.Row]:
        """A row for each of the variants."""
        documents = [PromptDocument("", each.title, each.text) for each in question.documents]
        prompt = self._builder.build(question.question, documents, max_prompt_tokens=8192 - NEW_TOKENS)
        given = GivenScores(self._builder, self._embedder, question.documents, self._sentence_bytes)
        found = self._chooser.sentences(prompt, given.of(question.question, prompt))
        asked = Asked.of(self._reader, self._head, question, prompt, found)
        for variant in variants:
            kept = variant.kept(asked, keep)
            answer = self._tokenizer.decode(asked.answer(self._reader, variant, keep))
            texts = [self._tokenizer.decode(run) for run in runs_of(prompt, kept)]
            yield {
                "set": name,
                "id": question.id,
                "strategy": variant.label,
                "answer": answer,
                "kept": len(kept) / prompt.tokens_kept,
                "holds": any(contains_answer(text, question.answers) for text in texts),
                "f1": token_f1(answer, question.answers),
            }


def table(known: Mapping[rows.Key, rows.Row]) -> Iterator[dict[str, Any]]:
    """A row for each set and variant, over the questions asked under all of them."""
    for name in dict.fromkeys(place[0] for place in known):
        asked = {place[1] for place in known if place[0] == name}
        ids = [one for one in asked if all((name, one, each.label) in known for each in VARIANTS)]
        full = [known[name, one, VARIANTS[0].label]["f1"] for one in ids]
        for variant in VARIANTS:
            own = [known[name, one, variant.label] for one in ids]
            lost = [100 * (best - row["f1"]) for best, row in zip(full, own, strict=True)]
            yield {
                "set": name,
                "n": len(ids),
                "what is kept": variant.name,
                "KV of": variant.kv,
                "positions": "closed up" if variant.closed else "original",
                "kept": round(100 * statistics.fmean(row["kept"] for row in own), 1),
                "answer kept": round(100 * statistics.fmean(row["holds"] for row in own), 1),
                "f1": round(100 * statistics.fmean(row["f1"] for row in own), 1),
                "below_full": round(statistics.fmean(lost), 1),
                "below_full_se": round(statistics.stdev(lost) / len(lost) ** 0.5, 1),
            }


def runs_of(prompt: Prompt, kept: Sequence[int]) -> list[list[int]]:
    """Token ids of the kept runs of neighbours within a document."""
    starts = {span.start for span in prompt.spans[1:]}
    runs: list[list[int]] = []
    for previous, place in zip([-2, *kept], kept, strict=False):
        if place != previous + 1 or place in starts:
            runs.append([])
        runs[-1].append(prompt.input_ids[place])
    return runs


if __name__ == "__main__":
    sys.exit(main())
