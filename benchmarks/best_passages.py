"""F1 of answers to the best passages alone, whole, while they fit into a share of the document tokens: what a
selection of sentences has to beat.

    python -m benchmarks.best_passages --data qed10.jsonl.gz --data squad10.jsonl.gz --work FOLDER
        [--limit 100] [--seconds S] [--device cuda] [--out FILE]

Passages are taken by the retriever's score and read in the order of the prompt, as a prompt of their own, by
the embedded model in plain PyTorch, float32. Rows are written to FOLDER as they come; the same command goes
on where it stopped."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.places import RESULTS
from benchmarks.lib.torch_reader import NEW_TOKENS, TorchReader, arguments, write_rows
from benchmarks.selection_curve import WHOLE
from ragserve.answering.prompt import PromptBuilder, PromptDocument, load_tokenizer
from ragserve.config import DEFAULT_MODEL
from ragserve.eval.data import Question
from ragserve.retrieval.embedder import Embedder
from ragserve.verification import report, rows
from ragserve.verification.given_scores import GivenScores
from ragserve.verification.metrics import token_f1

OUT = RESULTS / "best-passages.json"
ALL = 1.0
SHARES = (0.15, 0.25, 0.4, 0.6)
NOTE = (
    "f1: percent; f1_vs_full: points above the same reader with all documents on the same questions, +- its "
    "standard error. kept: mean percent of the document tokens. Plain PyTorch, float32, greedy."
)


class Reading:
    """Asks questions behind all and behind the best of their documents."""

    def __init__(self, device: str) -> None:
        self._reader, self._device = TorchReader(Path(DEFAULT_MODEL), device), device
        self._tokenizer = load_tokenizer(DEFAULT_MODEL)
        self._builder, self._embedder = PromptBuilder(self._tokenizer), Embedder()

    def rows(self, name: str, question: Question) -> Iterator[rows.Row]:
        """A row for each share."""
        documents = [PromptDocument("", each.title, each.text) for each in question.documents]
        given = GivenScores(self._builder, self._embedder, question.documents, 0)
        order = given.nearest(question.question, len(documents))
        prompt = self._builder.build(question.question, documents, max_prompt_tokens=8192 - NEW_TOKENS)
        sizes = [span.end - span.start for span in prompt.spans[1:]]
        for share in (ALL, *SHARES):
            shown: list[int] = []
            for number in order[: len(sizes)]:
                if sum(sizes[one] for one in (*shown, number)) > share * sum(sizes):
                    break
                shown.append(number)
            text = self._answer(question.question, [documents[number] for number in sorted(shown)])
            yield {
                "set": name,
                "id": question.id,
                "strategy": str(share),
                "kept": sum(sizes[number] for number in shown) / sum(sizes),
                "f1": token_f1(text, question.answers),
            }

    def _answer(self, question: str, documents: list[PromptDocument]) -> str:
        prompt = self._builder.build(question, documents, max_prompt_tokens=8192 - NEW_TOKENS)
        ids = torch.tensor(prompt.input_ids, device=self._device)
        places = torch.arange(len(ids), device=self._device)
        found = self._reader.answer(ids, places, [], places[:0])
        return str(self._tokenizer.decode(found))


def table(known: Mapping[rows.Key, rows.Row]) -> Iterator[dict[str, Any]]:
    """A row for each set and share, over the questions asked at all shares."""
    for name in dict.fromkeys(place[0] for place in known):
        asked = dict.fromkeys(place[1] for place in known if place[0] == name)
        ids = [one for one in asked if all((name, one, str(share)) in known for share in (ALL, *SHARES))]
        for share in (ALL, *SHARES):
            own = [known[name, one, str(share)] for one in ids]
            gained = [
                100 * (row["f1"] - known[name, one, str(ALL)]["f1"])
                for row, one in zip(own, ids, strict=True)
            ]
            kept = round(100 * statistics.fmean(row["kept"] for row in own), 1)
            yield {
                "set": name,
                "strategy": "full" if share == ALL else f"{WHOLE}, {share:.0%}",
                "n": len(ids),
                "f1": round(100 * statistics.fmean(row["f1"] for row in own), 2),
                "f1_vs_full": round(statistics.fmean(gained), 2),
                "f1_vs_full_se": round(statistics.stdev(gained) / len(gained) ** 0.5, 2),
                "kept": kept,
                "recomputed": kept,
            }


def main() -> int:
    parser = arguments(__doc__, 100, OUT)
    parser.add_argument("--device", default="cpu", help="of the model")
    given = parser.parse_args()
    reading = Reading(given.device)

    def asked(name: str, question: Question, done: set[str]) -> Iterator[rows.Row]:
        return iter(()) if str(SHARES[-1]) in done else reading.rows(name, question)

    write_rows(given, asked)
    workload = {"model": "ragserve-tiny", "dtype": "float32", "questions": f"at most {given.limit} a set"}
    report.write("best-passages", workload, list(table(rows.read(given.work))), out=given.out, note=NOTE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
