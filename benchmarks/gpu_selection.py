"""What the engine's own selections keep of the answers: `samkv` with all signals, and the paper's blocks.

    python -m benchmarks.gpu_selection OUT.json SETS_DIR [--only qed10,squad10,2wikimqa] [--limit 100]

Writes rows for `benchmarks/selection_curve.py --engine OUT.json`: percent of questions whose answer stands in
what is kept, over the mean share kept. Nothing is composed or generated: the selector is asked for the
positions that it would keep, with the retriever's scores and the model's attention. On a CPU a question takes
seconds, on a GPU a fraction of one."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.lib.fan_out import engine_args
from ragserve.answering.prompt import PromptBuilder, PromptDocument, load_tokenizer
from ragserve.config import load
from ragserve.engine.offline import run_once
from ragserve.eval.data import Question, find, set_name
from ragserve.eval.data import load as load_questions
from ragserve.files import write_json
from ragserve.retrieval.embedder import Embedder
from ragserve.verification.given_scores import GivenScores
from ragserve.verification.metrics import contains_answer

if TYPE_CHECKING:
    from ragserve.engine.local import LocalEngine

SHARES = (0.05, 0.1, 0.15, 0.25, 0.4, 0.6)
LINES: dict[str, dict[str, Any]] = {
    "samkv": {},
    "samkv without scores": {"experimental": {"retrieval_weight": 0.0}},
    "the paper's blocks": {
        "selection": "shared",
        "experimental": {"scoring": "zscore", "question_query": "mean"},
    },
    "blocks by attention": {"selection": "shared"},
    "blocks with a prior": {"selection": "shared", "experimental": {"document_prior": 1.0}},
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("sets", type=Path)
    parser.add_argument("--only", default="qed10,squad10,2wikimqa")
    parser.add_argument("--limit", type=int, default=100, help="questions of each set")
    given = parser.parse_args()
    # nothing is decoded, and several of these may run side by side
    graphs = {"cuda_graph_max_bs_decode": 1, "disable_prefill_cuda_graph": True}
    settings = load(kv_disk_bytes=0, engine_args=graphs | engine_args(None))
    paths = [find(name, given.sets) for name in given.only.split(",")]
    embedder = Embedder.of(settings)

    async def work(engine: LocalEngine) -> list[dict[str, Any]]:
        tokenizer = load_tokenizer(engine.info.tokenizer)
        builder, rows = PromptBuilder(tokenizer), []
        for path in paths:
            questions = [q for q in load_questions(path, given.limit) if answerable(q)]
            kept = [
                await selected(engine, builder, tokenizer, question, embedder, settings.sentence_bytes)
                for question in questions
            ]
            rows += table(set_name(path), kept)
            write_json(given.out, {"rows": rows})
            print(f"{path.name}: {len(kept)} questions", flush=True)
        return rows

    for row in run_once(settings, work):
        print(json.dumps(row))
    return 0


def answerable(question: Question) -> bool:
    return any(contains_answer(document.text, question.answers) for document in question.documents)


async def selected(
    engine: LocalEngine,
    builder: PromptBuilder,
    tokenizer: Any,
    question: Question,
    embedder: Embedder,
    sentence_bytes: int,
) -> list[tuple[float, bool]]:
    """For every line and share the share kept, and whether an answer stands in it."""
    documents = [PromptDocument("", d.title, d.text) for d in question.documents]
    prompt = builder.build(question.question, documents, max_prompt_tokens=engine.info.max_prompt_tokens)
    given = GivenScores(builder, embedder, question.documents, sentence_bytes)
    scores = given.of(question.question, prompt)
    end, ids = prompt.spans[-1].end, prompt.input_ids
    answer = await engine.control(
        "probe",
        ids=ids[:end],
        spans=[[span.start, span.end] for span in prompt.spans],
        questions=[{"ids": ids[end:], "needed": [[end - 1, end]]}],
        selections=[{"keep": share, **options} for options in LINES.values() for share in SHARES],
        scores=scores.to_lists() if scores else None,
    )
    starts = {span.start for span in prompt.spans[1:]}
    found = []
    for [positions] in answer["kept"]:
        texts = [tokenizer.decode([ids[place] for place in run]) for run in runs_of(positions, starts)]
        holds = any(contains_answer(text, question.answers) for text in texts)
        found.append((len(positions) / prompt.tokens_kept, holds))
    return found


def runs_of(positions: Sequence[int], starts: set[int]) -> list[list[int]]:
    """Positions in a row, cut where a document starts."""
    bounds = sorted(starts)

    def run(item: tuple[int, int]) -> tuple[int, int]:
        number, place = item
        return place - number, sum(start <= place for start in bounds)

    return [[place for _, place in group] for _, group in groupby(enumerate(positions), run)]


def table(name: str, kept: Sequence[Sequence[tuple[float, bool]]]) -> list[dict[str, Any]]:
    """A row for each line and share."""
    cases = [(line, share) for line in LINES for share in SHARES]
    return [
        {
            "set": name,
            "line": line,
            "at": share,
            "n": len(found),
            "kept": round(100 * statistics.fmean(own for own, _ in found), 1),
            "answer kept": round(100 * statistics.fmean(holds for _, holds in found), 1),
        }
        for (line, share), found in zip(cases, zip(*kept, strict=True), strict=True)
    ]


if __name__ == "__main__":
    sys.exit(main())
