"""A new user's way with a real model, as docs/first-hour.md has it: ingest 100 articles, serve, ask.

    python -m benchmarks.first_hour MODEL ARTICLES.jsonl.xz [--out FILE] [--work FOLDER]

MODEL: a folder with Qwen2.5-Coder-0.5B-Instruct (`benchmarks.real_models get`). ARTICLES: lines {title,
text}, of which the first 100 become text files; the questions below are about those of wiki2021-00. Every
command of the page is run, and its output is what stands there. The eleven questions are asked twice with
`ragserve query`'s route: exactly (``prefix``), and composed from documents' KV that was computed before
(``concat``, everything kept, 15 % recomputed; forced, as nothing is verified in the first hour)."""

from __future__ import annotations

import argparse
import json
import lzma
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib.places import REPO
from ragserve.client import Answer, Client
from ragserve.engine.running_server import running_server
from ragserve.verification.metrics import contains_answer

OUT = REPO / "docs" / "first-hour.md"
ARTICLES = 100
NAMESPACE = "articles"
QUESTIONS = {
    "Who directed the film Worth?": "Sara Colangelo",
    "When was the Zuse Z23 first delivered?": "1961",
    "In which lake is the Vogelinsel?": "Lake Constance",
    "When did modern cultivation of coffee in China begin?": "1988",
    "Who wrote the novel The House on the Roof?": "Eberhart",
    "Which author wrote The Dragonsitter?": "Josh Lacey",
    "Where is the brewery Golden Guinea located?": "Umuahia",
    "How high is the waterfall Gadelsha?": "15",
    "When was Capri Everitt born?": "August 30, 2004",
    "In which German state's town are the ruins of Nideggen Castle a symbol?": "Nideggen",
}
NOT_THERE = "What does a ticket for the Louvre museum cost?"
COMPOSED = {"recompute": "question", "share": 0.15, "force": True}
SYSTEM = "Answer the question from the documents, in one short sentence."
_NEW_TOKENS = 32
_PLACES = re.compile(r"/(?:tmp|work|root)/[^\s'\"]*/(?=[^/\s'\"]*)")


@dataclass(frozen=True, slots=True)
class Asked:
    """A question, answered exactly and composed."""

    question: str
    exact: Answer
    first: Answer  # composed, with documents whose KV is computed for it
    composed: Answer  # again, of stored KV

    def is_right(self, answer: Answer) -> bool:
        return self.question in QUESTIONS and contains_answer(answer.answer, [QUESTIONS[self.question]])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("articles", type=Path)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--first", type=int, default=ARTICLES, help="articles to ingest")
    parser.add_argument("--ask", type=int, default=len(QUESTIONS), help="questions to ask")
    parser.add_argument("--work", type=Path, help="folder of files and data; default: one that goes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        articles = list(first(options.articles, options.first))
        questions = list(QUESTIONS)[: options.ask]
        options.out.write_text(page(options.model, articles, questions, work), encoding="utf-8")
    print(f"written: {options.out}")
    return 0


def page(model: Path, articles: Sequence[dict[str, Any]], questions: Sequence[str], work: Path) -> str:
    """Run everything and return the page."""
    files, data = work / "articles", work / "data"
    shutil.rmtree(files, ignore_errors=True)
    files.mkdir(parents=True)
    for number, article in enumerate(articles, 1):
        text = f"{article['title']}\n\n{article['text']}"
        (files / f"{number:03d}.txt").write_text(text, encoding="utf-8")
    ingested, ingest_s = run("ingest", str(files), "--namespace", NAMESPACE, *where(data, model))
    run("docs", "settings", NAMESPACE, "--system", SYSTEM, "--data-dir", str(data))
    settings, _ = run("docs", "settings", NAMESPACE, "--data-dir", str(data))
    with running_server(data_dir=data, model=model) as server, Client(server.url) as client:
        start_s = server.start_s
        info = client.info()
        asked = [ask(client, question) for question in (*questions, NOT_THERE)]
        query = ("--namespace", NAMESPACE, "--url", server.url, "--strategy", "prefix")
        shown, _ = run("query", questions[0], *query)
        doubted, _ = run("query", NOT_THERE, *query)
    right = [sum(each.is_right(answer(each)) for each in asked) for answer in (_exact, _composed)]
    return "\n".join(
        [
            "# The first hour",
            "",
            "What a new user sees with a real model of half a billion parameters on "
            f"{info.engine['device'].upper()} with two cores: a transcript that `python -m "
            "benchmarks.first_hour` makes. Every command was run; paths are shortened.",
            "",
            f"Model {model.name} in {info.engine['dtype']}, ragserve {info.versions['ragserve']}, SGLang "
            f"{info.versions['sglang']}, {len(articles)} articles of an English encyclopedia.",
            "",
            f"## Ingest: {ingest_s:.0f} s",
            "",
            *console(f"ragserve ingest articles --namespace {NAMESPACE} --model {model.name}", ingested),
            "",
            "The namespace's own system text, which its queries have from now on:",
            "",
            *console(f'ragserve docs settings {NAMESPACE} --system "{SYSTEM}"', settings),
            "",
            f"## Serve: {start_s:.0f} s",
            "",
            f"`ragserve serve --model {model.name}` was ready after {start_s:.0f} s.",
            "",
            "## Ask",
            "",
            *console(f'ragserve query "{questions[0]}" -n {NAMESPACE} --strategy prefix', shown),
            "",
            f"{len(questions)} questions, each exactly (`prefix`) and composed from the documents' KV "
            "(`concat`, `recompute=question`, `share=0.15`, forced: nothing is verified in the first hour). "
            "Milliseconds from the request to the first token; of composed answers once the documents' KV is "
            "stored, and at first, when it is computed. Cited are passages of five that support the answer "
            "([how](answers.md#citations)).",
            "",
            "| question | exact | cites | ms | composed | cites | ms | ms at first |",
            "|---|---|---|---|---|---|---|---|",
            *(f"| {row(each)} |" for each in asked[:-1]),
            "",
            f"On average {mean(asked, _exact):,.0f} ms exact, {mean(asked, _composed):,.0f} composed, and "
            f"{mean(asked, _first):,.0f} at first. Right, by the words that an answer must contain: "
            f"{right[0]} exact and {right[1]} composed of {len(questions)}. A model of this size makes "
            "mistakes with the right passages before it.",
            "",
            "## What is not there",
            "",
            "The articles do not say what the Louvre costs. The answer says so in a note, and a sentence "
            "that no passage supports is marked; with `--not-found refuse` it would be a refusal.",
            "",
            *console(f'ragserve query "{NOT_THERE}" -n {NAMESPACE} --strategy prefix', doubted),
            "",
        ]
    )


def _exact(each: Asked) -> Answer:
    return each.exact


def _composed(each: Asked) -> Answer:
    return each.composed


def _first(each: Asked) -> Answer:
    return each.first


def mean(asked: Sequence[Asked], answer: Callable[[Asked], Answer]) -> float:
    """Milliseconds to the first token, without the last question, which has no answer."""
    return statistics.mean(answer(each).timings.ttft_ms or 0 for each in asked[:-1])


def first(path: Path, n: int) -> Iterator[dict[str, Any]]:
    """The first lines of a file."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        for _, line in zip(range(n), file, strict=False):
            yield json.loads(line)


def where(data: Path, model: Path) -> Sequence[str]:
    return ("--data-dir", str(data), "--model", str(model))


def run(*arguments: str) -> tuple[str, float]:
    """Run a command of ragserve: its output and seconds. Raises CalledProcessError."""
    started = time.monotonic()
    command = [sys.executable, "-m", "ragserve.cli", *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout.strip(), time.monotonic() - started


def ask(client: Client, question: str) -> Asked:
    """Ask a question both ways, composed first: an exact answer would leave the prompt in the prefix
    cache."""
    common: dict[str, Any] = {"namespace": NAMESPACE, "max_new_tokens": _NEW_TOKENS}
    first, again = (
        client.query(question, strategy="concat", strategy_options=COMPOSED, **common) for _ in range(2)
    )
    return Asked(question, client.query(question, strategy="prefix", **common), first, again)


def row(each: Asked) -> str:
    cells = [each.question]
    for answer in (each.exact, each.composed):
        text = " ".join(answer.answer.split()).replace("|", "\\|")
        cited = ", ".join(f"{citation.title} ({citation.basis})" for citation in answer.citations) or "none"
        cells += [text, cited.replace("|", "\\|"), f"{answer.timings.ttft_ms or 0:,.0f}"]
    return " | ".join([*cells, f"{each.first.timings.ttft_ms or 0:,.0f}"])


def console(command: str, output: str) -> list[str]:
    """A command with its output, paths shortened."""
    return ["```console", f"$ {command}", *_PLACES.sub("", output).splitlines(), "```"]


if __name__ == "__main__":
    sys.exit(main())
