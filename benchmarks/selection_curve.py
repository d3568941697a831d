"""The Pareto curve of selection: answers kept, and F1, over the mean share of the document tokens kept.

    python -m benchmarks.selection_curve --data qed10.jsonl.gz --data squad10.jsonl.gz [--limit 40]
        [--out FILE] [--engine ENGINE.json] [--eval EVAL.json ...]

Answers kept need no model: percent of questions whose answer stands in what is kept, by all signals but
attention at fixed shares, by the same where the scores say how much is kept (`top_p`), by single signals, and
by the best passages whole. ``--engine`` adds what the engine keeps with attention, and by the paper's blocks
(`gpu_selection.py`). ``--eval`` adds F1 from a report of `ragserve eval` or `gpu_eval.py`:
`samkv`, and rules that keep everything and recompute a share, ProphetKV's (`question`) and QCFuse's
(`anchors`); or from one of `best_passages.py`. A given part takes the place of what FILE has of it;
everything else stays. Writes FILE, and a picture beside it."""

from __future__ import annotations

import argparse
import io
import json
import statistics
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.lib.places import RESULTS
from ragserve.answering.prompt import Prompt, PromptBuilder, PromptDocument, load_tokenizer
from ragserve.answering.sessions.sentence_choice import SentenceChooser
from ragserve.config import DEFAULT_MODEL, load
from ragserve.eval.data import Question, set_name
from ragserve.eval.data import load as load_questions
from ragserve.retrieval.embedder import Embedder
from ragserve.strategy_spec import parse
from ragserve.verification import report
from ragserve.verification.given_scores import GivenScores
from ragserve.verification.metrics import contains_answer
from sglang_ext.wire.protocol import RetrievalScores
from sglang_ext.wire.request_options import SamKvOptions

OUT = RESULTS / "selection-curve.json"
SHARES = (0.025, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.6)
COLUMNS = 4  # sets side by side in the picture
TOP_P = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_ONE = {"feedback_weight": 0.0}
LINES: dict[str, dict[str, float]] = {
    "all signals": {"lexical_weight": 1.0},
    "without feedback": {"lexical_weight": 1.0, **_ONE},
    "words": {"retrieval_weight": 0.0, "lexical_weight": 1.0, **_ONE},
    "passages' scores": {"retrieval_weight": 1.0, "document_weight": 1.0, **_ONE},
    "sentences' scores": {"retrieval_weight": 1.0, "document_weight": 0.0, **_ONE},
}
_ON_THE_AXIS = ("keep", "share", "top_p")
WHOLE, BY_SCORES = "best passages whole", "all signals, top_p"


@dataclass(frozen=True)
class CurveQuestion:
    """A question with its prompt and the retriever's scores."""

    question: Question
    prompt: Prompt
    scores: RetrievalScores


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, action="append", default=[], help="a question set")
    parser.add_argument("--limit", type=int, default=40, help="questions of each set")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--engine", type=Path, default=None, help="what gpu_selection.py wrote")
    parser.add_argument(
        "--eval", type=Path, action="append", default=[], help="a report with F1 of the same sets"
    )
    given = parser.parse_args()
    rows = known(given.out) if given.out.exists() else []
    for path in given.data:
        rows = replaced(rows, answer_rows(path, given.limit))
    if given.engine:
        rows = replaced(rows, known(given.engine))
    workload = {"questions": f"at most {given.limit} a set"}
    ran_on = None if given.data else json.loads(given.out.read_text())["environment"]
    for path in given.eval:
        measured = json.loads(path.read_text())
        served, machine = measured["workload"], measured["environment"]
        where = machine["gpu"] or machine["cpu"]
        workload[f"f1, {path.stem}"] = f"{served['model']}, {served['dtype']}, {where}, {machine['date']}"
        rows = replaced(rows, f1_rows(measured, {row["set"] for row in rows}))
    report.write(
        "selection-curve",
        workload,
        rows,
        out=given.out,
        ran_on=ran_on,
        note="kept, recomputed: mean percent of the document tokens; answer kept: percent of questions whose "
        "answer stands in what is kept, with signal attention where the line is samkv or blocks. f1: of "
        "answers, by eval; full is at 100 % kept.",
    )
    given.out.with_suffix(".svg").write_text(drawn(rows), encoding="utf-8")
    return 0


def known(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return rows


def replaced(rows: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """``rows`` without those of the sets and lines of ``new``, which follow."""
    lines = {(row["set"], row["line"]) for row in new}
    return [row for row in rows if (row["set"], row["line"]) not in lines] + list(new)


def answer_rows(path: Path, limit: int) -> list[dict[str, Any]]:
    """The rows of a set that need no model."""
    embedder, tokenizer = Embedder(), load_tokenizer(DEFAULT_MODEL)
    builder, chooser, sentence_bytes = (
        PromptBuilder(tokenizer),
        SentenceChooser(tokenizer),
        load().sentence_bytes,
    )
    asked = []
    for question in load_questions(path, limit):
        if not any(contains_answer(document.text, question.answers) for document in question.documents):
            continue
        given = GivenScores(builder, embedder, question.documents, sentence_bytes)
        documents = [PromptDocument("", d.title, d.text) for d in question.documents]
        prompt = builder.build(question.question, documents, max_prompt_tokens=10**6)
        scores = given.of(question.question, prompt) or RetrievalScores((), ())
        asked.append(CurveQuestion(question, prompt, scores))
    return _of_set(set_name(path), asked, chooser)


def _of_set(name: str, asked: Sequence[CurveQuestion], chooser: SentenceChooser) -> list[dict[str, Any]]:
    points: dict[tuple[str, float], list[tuple[float, bool]]] = {}
    for each in asked:
        sentences = chooser.sentences(each.prompt, each.scores)
        tokens = each.prompt.tokens_kept
        for line, weights in LINES.items():
            options = SamKvOptions.model_validate({"experimental": weights})
            for share, runs in zip(SHARES, sentences.runs(options, SHARES), strict=True):
                points.setdefault((line, share), []).append(_point(each, chooser, runs, tokens))
        for p in TOP_P:
            options = SamKvOptions.model_validate({"top_p": p, "experimental": LINES["all signals"]})
            runs = sentences.chosen_runs(options)
            points.setdefault((BY_SCORES, p), []).append(_point(each, chooser, runs, tokens))
        for share in SHARES:
            points.setdefault((WHOLE, share), []).append(_whole(each, share))
    return [
        {
            "set": name,
            "line": line,
            "at": at,
            "n": len(found),
            "kept": round(100 * statistics.fmean(kept for kept, _ in found), 1),
            "answer kept": round(100 * statistics.fmean(holds for _, holds in found), 1),
        }
        for (line, at), found in points.items()
    ]


def _point(
    each: CurveQuestion, chooser: SentenceChooser, runs: Sequence[list[int]], tokens: int
) -> tuple[float, bool]:
    holds = any(contains_answer(chooser.read(run), each.question.answers) for run in runs)
    return sum(map(len, runs)) / tokens, holds


def _whole(each: CurveQuestion, share: float) -> tuple[float, bool]:
    """The best passages by the retriever's score, while they fit into the share."""
    sizes = [span.end - span.start for span in each.prompt.spans[1:]]
    order = sorted(range(len(sizes)), key=lambda i: -(each.scores.documents[i] or 0.0))
    used, holds = 0, False
    for i in order:
        if used + sizes[i] > share * sum(sizes):
            break
        used += sizes[i]
        holds = holds or contains_answer(each.question.documents[i].text, each.question.answers)
    return used / sum(sizes), holds


def f1_rows(measured: Mapping[str, Any], sets: Collection[str]) -> list[dict[str, Any]]:
    """The rows of a report of eval: a line for each strategy, whatever share it keeps or recomputes. A set
    whose file has a longer name than one of ``sets`` (2wikimqa_200.jsonl) is that one."""

    def named(name: str) -> str:
        return next((known for known in sorted(sets) if name.startswith(f"{known}_")), name)

    return [
        {"set": named(row["set"]), "line": line_of(row["strategy"]), "at": row["strategy"]}
        | {name: row[name] for name in ("n", "kept", "recomputed", "f1", "f1_vs_full", "f1_vs_full_se")}
        for row in measured["rows"]
        if not (measured["benchmark"] == "best-passages" and row["strategy"] == "full")
    ]


def line_of(strategy: str) -> str:
    """The strategy without the shares that it keeps and recomputes: the points of one line."""
    if strategy.startswith(WHOLE):
        return f"F1: {WHOLE}, alone"
    [spec] = parse(strategy)
    tuned = dict(spec.options.get("experimental", {}))
    fixed = {key: value for key, value in spec.options.items() if key not in (*_ON_THE_AXIS, "experimental")}
    if tuned.get("retrieval_weight") == tuned.get("feedback_weight") == 0:
        tuned = {"no scores or feedback": ""}
    if fixed.get("selection") == "layers":
        fixed, tuned = {"the paper's blocks": ""}, {}
    names = [f"{key}={value}" if value != "" else key for key, value in sorted((fixed | tuned).items())]
    return ", ".join([f"F1: {spec.name}", *names])


def drawn(rows: Sequence[Mapping[str, Any]]) -> str:
    """The picture, as SVG: a column for each set, answers kept above F1, in blocks of some sets."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    style = {"svg.hashsalt": "ragserve", "svg.fonttype": "none", "font.size": 9}
    sets = list(dict.fromkeys(row["set"] for row in rows))
    figures = [name for name in ("answer kept", "f1") if any(name in row for row in rows)]
    lines = list(dict.fromkeys(row["line"] for row in rows))
    across = min(len(sets), COLUMNS)
    blocks = [sets[n : n + across] for n in range(0, len(sets), across)]
    with mpl.rc_context(style):
        size = (4.2 * across, 3.6 * len(figures) * len(blocks))
        figure = Figure(figsize=size, layout="constrained")
        grid = figure.subplots(len(figures) * len(blocks), across, squeeze=False)
        for axes, (block, name) in zip(grid, product(blocks, figures), strict=True):
            for axis in axes[len(block) :]:
                axis.set_visible(False)
            for axis, own in zip(axes, block, strict=False):
                for number, line in enumerate(lines):
                    found = sorted(
                        (row["kept"], row[name])
                        for row in rows
                        if (row["set"], row["line"]) == (own, line) and name in row
                    )
                    if found:
                        kept, height = zip(*found, strict=True)
                        axis.plot(kept, height, label=line, color=f"C{number % 10}", marker="o", markersize=3)
                axis.set(title=own, xlabel="document tokens kept, %", ylabel=f"{name}, %")
                axis.grid(alpha=0.3)
        handles = {
            label: handle
            for axis in grid.flat
            for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
        }
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()


if __name__ == "__main__":
    sys.exit(main())
