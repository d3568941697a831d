"""What `ragserve tune` and strategy `auto` bring over HTTP: first token and F1 of a held set of labelled
questions, before and after.

    python -m benchmarks.gpu_auto_over_http OUT_DIR SQUAD.json.gz ARTICLES.jsonl.xz --model FOLDER [--k 24]
        [--questions 300] [--passages 450] [--words 800] [--minutes 20] [--seconds 540] [--only PASS,...]

Passages of about 1,000 tokens (``--words``): the paragraphs of SQuAD's articles joined in their order, and
beginnings of other articles. Questions are SQuAD's, spread over it; nothing but the report sees their
answers. Passes, one question at a time, streamed; those after `tune` take turns on one server, every twenty
questions, each turn with an empty prefix cache, and find the passages tokenised:

* ``warm``: none is asked; the server stays until the documents' KV is stored, which later passes read;
* ``before``: `auto` where nothing is verified, which is `prefix`;
* ``tune``: `ragserve tune`, without labels, in runs of what is left of ``--seconds``, ``--minutes`` at most;
* ``after``: `auto` with what came of it;
* ``k=1``, ``k=3``, ``k=5``, ``k=10`` (``--rivals``): exact prefill of so many passages.

Rows are kept in OUT_DIR: the same command goes on where it stopped, and ``--seconds 0`` only reports. Needs
SGLang, an embedder (RAGSERVE_EMBEDDER: name or folder) and this checkout; RAGSERVE_ATTENTION names the
attention backend. ``--cpu`` leaves the engine to SGLang's defaults, for a trial without a GPU."""

from __future__ import annotations

import argparse
import gzip
import json
import lzma
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import httpx

from benchmarks.lib.fan_out import engine_args
from ragserve.api.views import MessageEvent
from ragserve.client import Answer, Client
from ragserve.engine.running_server import running_server
from ragserve.eval.data import spread
from ragserve.verification import MAX_TOKENS, report, rows
from ragserve.verification.metrics import token_f1
from ragserve.verification.question_probes import SHORT

NAMESPACE = "held"
POOL_TOKENS = 300_000
HOST_BYTES = 20 * 2**30  # KV of all passages, of a 1.5B model 14 GB
BLOCK = 20  # questions that one pass asks before the next asks them, so that slow phases meet all alike
WARM_S = 3600.0  # at most, until the documents' KV is stored
NOTE = (
    "F1 of whole answers, percent; vs before: points, and half the width of the 95 % interval of the paired "
    "difference. "
    "ttft: milliseconds from the request to the first piece of the answer, at the client, median and 90th "
    "percentile. read: document tokens in the prompt, computed: of these anew, means. embed to prefill: "
    "medians of the stages, as the server reports them; prompt includes the choice."
)
Row = dict[str, Any]


def squad(path: Path, words: int) -> tuple[list[tuple[str, str]], list[Row]]:
    """Passages (title, text) of about ``words``, and the questions about them."""
    with gzip.open(path) as file:
        articles = json.load(file)["data"]
    passages: list[tuple[str, str]] = []
    questions: list[Row] = []
    for article in articles:
        title, text = article["title"].replace("_", " "), ""
        for paragraph in article["paragraphs"]:
            if text and len(f"{text} {paragraph['context']}".split()) > words:
                passages.append((title, text))
                text = ""
            text = f"{text}\n\n{paragraph['context']}".strip()
            for asked in paragraph["qas"]:
                if asked["answers"]:
                    answers = list(dict.fromkeys(each["text"] for each in asked["answers"]))
                    questions.append({"id": asked["id"], "question": asked["question"], "answers": answers})
        passages.append((title, text))
    return passages, questions


def others(path: Path, words: int, known: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Beginnings of articles that are long enough, as distractors."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        for article in map(json.loads, file):
            found = article["text"].split(" ")
            if len(found) >= words and article["title"] not in known:
                yield article["title"], " ".join(found[:words])


class Run:
    """The folder of a run: its passages, its data folder and its rows."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.until = time.monotonic() + given.seconds
        self.data = given.out / "data"
        passages, questions = squad(given.squad, given.words)
        self.questions = spread(questions, given.questions)
        titles = [title for title, _ in passages]
        wanted = max(0, given.passages - len(passages))
        self.passages = [*passages, *islice(others(given.articles, given.words, titles), wanted)]
        self.passages = self.passages[: given.passages] if given.cpu else self.passages
        self.settings: dict[str, Any] = {"model": given.model, "top_k": given.k, "control_routes": True}
        self.settings["chunk_tokens"] = round(2.5 * given.words)  # a passage is a chunk
        if not given.cpu:
            graphs = {"cuda_graph_max_bs_decode": 8, "disable_prefill_cuda_graph": True}
            self.settings |= {"max_total_tokens": POOL_TOKENS, "kv_host_bytes": HOST_BYTES}
            self.settings["engine_args"] = json.dumps(graphs | engine_args(None))

    @property
    def left_s(self) -> float:
        return self.until - time.monotonic()

    def command(self, *words: str) -> None:
        """Run a ragserve command on the data folder. Raises CalledProcessError."""
        command = [sys.executable, "-m", "ragserve.cli", *words, "--data-dir", str(self.data)]
        subprocess.run(command, check=True)

    def ingested(self) -> None:
        """Ingest the passages, once."""
        mark, files = self.given.out / "ingested", self.given.out / "passages"
        if mark.exists():
            return
        files.mkdir(exist_ok=True)
        for number, (title, text) in enumerate(self.passages):
            (files / f"{number:04d}.txt").write_text(f"{title}\n\n{text}\n", encoding="utf-8")
        own = ("--namespace", NAMESPACE, "--model", self.given.model)
        self.command("ingest", str(files), *own, "--chunk-tokens", str(self.settings["chunk_tokens"]))
        mark.touch()

    def asked(self, passes: Mapping[str, tuple[str, Mapping[str, Any] | None]]) -> None:
        """Ask what has no row yet, on one server, while there is time. ``passes``: strategy and options."""
        known = rows.read(self.given.out)
        left = {
            name: [each for each in self.questions if (NAMESPACE, each["id"], name) not in known]
            for name in passes
        }
        if not any(left.values()) or self.left_s < 0:
            return
        with self._served() as client:
            for question in self.questions:  # no pass is the first to have its passages tokenised
                if self.left_s > 0:
                    _answered(client, question, "passages", {"by": "score", "count": 1})
            for start in range(0, len(self.questions), BLOCK):
                ids = {each["id"] for each in self.questions[start : start + BLOCK]}
                order = list(passes.items())
                for name, (strategy, options) in order if start // BLOCK % 2 else reversed(order):
                    httpx.post(f"{client.url}/flush_cache").raise_for_status()
                    with rows.appending(self.given.out / f"rows-{name}.jsonl") as write:
                        for question in (each for each in left[name] if each["id"] in ids):
                            if self.left_s < 0:
                                return
                            about = {"set": NAMESPACE, "id": question["id"], "strategy": name, "error": None}
                            write(about | _answered(client, question, strategy, options))

    def warmed(self) -> None:
        """Leave the documents' KV in the data folder, once."""
        mark = self.given.out / "warmed"
        if not mark.exists() and self.left_s > 0:
            with self._served():
                if self.left_s > 0:
                    mark.touch()

    @contextmanager
    def _served(self) -> Iterator[Client]:
        """Yield the client of a server, once the documents' KV is stored."""
        with (
            running_server(data_dir=self.data, **self.settings) as server,
            Client(server.url, no_store=True) as client,
        ):
            until = time.monotonic() + min(WARM_S, max(0.0, self.left_s))
            while client.info().model_dump()["warming"]["jobs"] and time.monotonic() < until:
                time.sleep(1.0)
            yield client

    def tuned(self) -> None:
        """Tune with the time that is left, until ``--minutes`` are spent."""
        place = self.given.out / "tune.json"
        spent: list[float] = json.loads(place.read_text()) if place.exists() else []
        minutes = min(self.given.minutes - sum(spent), self.left_s / 60 - 1)
        if minutes < 1:
            return
        engine = {k: v for k, v in self.settings.items() if k not in ("chunk_tokens", "control_routes")}
        flags = [word for k, v in engine.items() for word in (f"--{k.replace('_', '-')}", str(v))]
        began = time.monotonic()
        out = ["--out", str(self.given.out / "map")]
        self.command("tune", "--namespace", NAMESPACE, "--minutes", f"{minutes:.1f}", *flags, *out)
        place.write_text(json.dumps([*spent, (time.monotonic() - began) / 60]))


def _answered(client: Client, question: Row, strategy: str, options: Mapping[str, Any] | None) -> Row:
    """Ask over HTTP, streamed."""
    began, first_ms = time.perf_counter(), None
    answer: Answer | None = None
    for event in client.stream(
        question["question"],
        namespace=NAMESPACE,
        strategy=strategy,  # type: ignore[arg-type]
        strategy_options=options,
        system=SHORT,
        temperature=0.0,
        max_new_tokens=MAX_TOKENS,
    ):
        if isinstance(event, MessageEvent) and first_ms is None:
            first_ms = (time.perf_counter() - began) * 1e3
        if isinstance(event, Answer):
            answer = event
    if answer is None:
        raise RuntimeError("the stream ended without an answer")
    return {
        "f1": token_f1(answer.answer, question["answers"]),
        "ttft_ms": first_ms,
        "answer": answer.answer,
        "used": answer.context.strategy,
        "choice": answer.context.choice,
        "kept": answer.context.tokens_kept,
        "recomputed": answer.context.tokens_recomputed,
        "prompt": answer.usage.prompt,
        "timings": answer.timings.model_dump(exclude_none=True),
    }


def show(run: Run) -> None:
    """Report the rows that there are."""
    every = list(rows.read(run.given.out).values())
    passes = {row["strategy"] for row in every}
    names = sorted(passes, key=lambda name: (name != "before", name != "after", len(name), name))
    of = {name: {row["id"]: row for row in every if row["strategy"] == name} for name in names}
    table = [_row(name, own, of.get("before", {})) for name, own in of.items()]
    by = {row["pass"]: row for row in table}
    summary: dict[str, Any] = {}
    if "before" in by and "after" in by:
        summary["sooner"] = round(by["before"]["ttft ms"] / by["after"]["ttft ms"], 2)
        summary["F1 vs before"] = by["after"]["vs before"]
        rivals = [row for row in table if row["pass"].startswith("k=")]
        if rivals:
            best = max(rivals, key=lambda row: row["F1"])
            summary["best exact"] = best["pass"]
            gain, interval = _beside(of["after"], of[best["pass"]])
            summary["F1 vs that"] = f"{gain} +- {interval}"
            summary["sooner than that"] = round(best["ttft ms"] / by["after"]["ttft ms"], 2)
    workload = {
        "model": Path(run.given.model).name,
        "passages": len(run.passages),
        "words of a passage": run.given.words,
        "k": run.given.k,
        "questions": len(run.questions),
        "tune minutes": run.given.minutes,
    }
    out = run.given.out / "auto-over-http.json"
    report.write("auto-over-http", workload | summary, table, out=out, note=NOTE)


def _beside(own: Mapping[str, Row], other: Mapping[str, Row]) -> tuple[float | None, float | None]:
    """Points of F1 above another pass, and half the width of their 95 % interval."""
    gains = [100 * (row["f1"] - other[id_]["f1"]) for id_, row in own.items() if id_ in other]
    error = statistics.stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else None
    return (
        round(statistics.fmean(gains), 2) if gains else None,
        None if error is None else round(1.96 * error, 2),
    )


def _row(name: str, own: Mapping[str, Row], before: Mapping[str, Row]) -> Row:
    found = list(own.values())
    ttft = [row["ttft_ms"] for row in found]
    gain, interval = _beside(own, before)
    strategies = sorted({row["used"] for row in found})
    stages = {
        name.removesuffix("_ms") + " ms": round(statistics.median(each), 1)
        for name in ("embed_ms", "search_ms", "prompt_ms", "queue_ms", "prefill_ms")
        if (each := [row["timings"][name] for row in found if name in row.get("timings", {})])
    }
    return {
        "pass": name,
        "n": len(found),
        "F1": round(100 * statistics.fmean(row["f1"] for row in found), 2),
        "vs before": gain,
        "interval": interval,
        "ttft ms": round(statistics.median(ttft), 1),
        "p90": round(report.percentile(ttft, 90), 1),
        "prompt tokens": round(statistics.fmean(row["prompt"] for row in found)),
        "read": round(statistics.fmean(row["kept"] for row in found)),
        "computed": round(statistics.fmean(row["recomputed"] for row in found)),
        "strategy": ", ".join(strategies),
        "choice": found[-1]["choice"],
    } | stages


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("squad", type=Path)
    parser.add_argument("articles", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--k", type=int, default=24)
    parser.add_argument("--questions", type=int, default=300)
    parser.add_argument("--passages", type=int, default=450)
    parser.add_argument("--words", type=int, default=800, help="of a passage: about 1,000 tokens")
    parser.add_argument("--minutes", type=float, default=20, help="of tune, over all runs")
    parser.add_argument("--seconds", type=float, default=540, help="of this run, engine starts included")
    parser.add_argument("--only", default="warm,before,tune,after,k", help="passes; default: all")
    parser.add_argument("--rivals", default="1,3,5,10", help="passages that rivals read")
    parser.add_argument("--cpu", action="store_true", help="SGLang's defaults, and no more than --passages")
    given = parser.parse_args()
    given.out = given.out.resolve()
    given.out.mkdir(parents=True, exist_ok=True)
    run = Run(given)
    wanted = given.only.split(",")
    if given.seconds:
        run.ingested()
        if "warm" in wanted:
            run.warmed()
        if "before" in wanted:
            run.asked({"before": ("auto", None)})
        if "tune" in wanted:
            run.tuned()
        last: dict[str, tuple[str, Mapping[str, Any] | None]] = {}
        if "after" in wanted:
            last["after"] = "auto", None
        for count in map(int, given.rivals.split(",")):
            if "k" in wanted and count < given.k:
                last[f"k={count}"] = "passages", {"by": "score", "count": count}
        run.asked(last)
    show(run)
    return 0


if __name__ == "__main__":
    sys.exit(main())
