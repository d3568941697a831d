"""`ragserve tune`: verify strategies on one's own documents, without labels, and measure what they cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from ragserve.commands.options import ENGINE_SETTINGS, VERDICT_SETTINGS, Namespace, with_settings
from ragserve.config import Settings, StrategyName
from ragserve.files import temporary_folder
from ragserve.verification import MAX_TOKENS, MOST_QUESTIONS

SETTINGS = (
    *("model", "data_dir", "registry_url", "embedder", "embed_device", "top_k", "retrieval", "rerank"),
    *("rerank_candidates", "neighbours", "context_tokens", "min_score", "dedupe", "spelling"),
    *("kv_disk_bytes", *ENGINE_SETTINGS, *VERDICT_SETTINGS),
)
"""All that verdicts depend on are among them, so that a run can be like any server."""

_KINDS = {
    "asked": "asked by users",
    "given": "given",
    "written": "written by the model",
    "pair": "about two chunks",
    "cloze": "sentences with a gap",
}


def register(app: typer.Typer) -> None:
    app.command("tune")(with_settings(tune, SETTINGS))


@temporary_folder()
def tune(
    settings: Settings,
    context: typer.Context,
    namespace: Namespace = "default",
    minutes: Annotated[
        float, typer.Option(min=1, help="Time to spend, engine start included. A later run goes on.")
    ] = 10,
    questions: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="Questions to ask: a text file with one a line, or JSON lines with a `question` each and, "
            "where they are known, its `answers`. Default: those of users in the server's query log, if it "
            "keeps one, then questions about the namespace's own chunks.",
        ),
    ] = None,
    strategies: Annotated[
        str | None,
        typer.Option(
            help="Candidates: strategies with options, as for eval. Default: fewer passages of top_k, and "
            "all of them from stored KV, with several shares recomputed.",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, max=512, help="Longest answer that is compared, in tokens.")
    ] = MAX_TOKENS,
    most: Annotated[
        int, typer.Option("--max-questions", min=1, help="Questions to compare at most.")
    ] = MOST_QUESTIONS,
    at_once: Annotated[
        int,
        typer.Option(
            "--concurrency",
            min=1,
            help="Questions to ask at once, after a few one at a time for their times.",
        ),
    ] = 4,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the map, tune-NAMESPACE.json and .html. Default: tune in the data folder."
        ),
    ] = None,
) -> None:
    """Find what answers your own documents as well as full prefill, and sooner, without labels.

    Makes questions about a namespace's chunks whose answers are known: those that the model gives over the
    chunk alone. Asks them as /rag/query does, by the namespace's own settings where it has some and no flag
    gives another, under every candidate; picks the soonest of the best, and
    verifies them on other questions: what loss against full prefill is excluded? Writes a map of quality over
    time to the first token, the gate's record and the cost profile that strategy auto needs; samkv's profile
    where samkv is a candidate and there is none and, with --sparse-attention on, from which length sparse
    decoding pays. Stop a server on the same machine first: it would disturb the measurement."""
    from ragserve.commands.serve_checks import check_engine
    from ragserve.eval.console import progress
    from ragserve.eval.tune_map import map_of, page
    from ragserve.files import write_json, write_text
    from ragserve.retrieval.document_store import open_store
    from ragserve.setting_groups.per_namespace import NamespaceSettings
    from ragserve.strategy_spec import candidates, parse
    from ragserve.verification.calibration.tune_process import tune as run
    from ragserve.verification.verdicts import FOLDER

    names = [name for name in get_args(StrategyName) if name not in ("full", "prefix", "auto")]
    given = {name for name, value in context.params.items() if value is not None}  # of flags
    with open_store(settings) as store:
        store.namespace(namespace)  # before an engine is started for nothing
        settings = NamespaceSettings.usual(settings, store, namespace, given)
    specs = parse(strategies or candidates(settings.top_k), names)
    labels = [spec.label for spec in specs]
    check_engine(settings)
    settings = settings.model_copy(update={"max_new_tokens": max_new_tokens})
    with progress("tune", most) as step:
        result = run(
            settings,
            namespace,
            labels,
            seconds=60 * minutes,
            most=most,
            at_once=at_once,
            questions=questions,
            on_progress=lambda phase, done: step(done=done, what=phase),
        )
    place = out or settings.data_dir / FOLDER
    known = place / f"tune-{namespace}.json"
    _print(result, namespace, minutes, most)
    before: dict[str, Any] = json.loads(known.read_text(encoding="utf-8")) if known.exists() else {}
    found = map_of(result, before["points"] if before.get("model") == result["model"] else [])
    typer.echo(found["why"])
    write_json(known, found)
    shown = known.with_suffix(".html")
    write_text(shown, page(found))
    typer.echo(f"map: {shown}")
    typer.echo(f"written to {settings.data_dir}; a running server reads it at once")


def _print(result: dict[str, Any], namespace: str, minutes: float, most: int) -> None:
    from ragserve.verification.report import fitted_table

    counts = ", ".join(f"{count} {_KINDS[kind]}" for kind, count in result["questions"].items()) or "none"
    typer.echo(f"{namespace}: of {result['tried']} questions tried: {counts}; {result['costs']}")
    for failure, count in [*result["failures"].items()][:1]:
        every = sum(result["failures"].values())
        typer.echo(f"failures of questions and strategies: {every}, most often ({count}) {failure}")
    if phases := result.get("phases"):
        typer.echo("time: " + ", ".join(f"{name} {seconds:,} s" for name, seconds in phases.items()))
    if result["decode"]:
        typer.echo(result["decode"])
    full = {"label": "full", "decision": "", "figures": {}} | result["full"]
    rows = [
        {
            "strategy": one["label"],
            "score": "" if one["score"] is None else "{:.0f} [{:.0f}, {:.0f}]".format(*one["score"]),
            "vs full": _number(figures.get("score_vs_full"), "+.1f"),
            "margin": _number(figures.get("margin"), ".1f") if one["decision"] != "passed over" else "",
            "ms": _number(one["ttft_ms"], ".0f"),
            "kept %": _number(figures.get("kept"), ".0f"),
            "again %": _number(figures.get("recomputed"), ".0f"),
            "differ %": _number(figures.get("different"), ".0f"),
            "verdict": one["decision"],
        }
        for one in [full, *result["verdicts"]]
        for figures in [one["figures"]]
    ]
    table, console = fitted_table(rows, list(rows[0]), ("strategy", "score", "ms", "verdict"))
    console.print(table)
    typer.echo(
        "score: F1 and containment against the reference, percent, with its 95 % interval; vs full: points; "
        "margin: the smallest loss excluded at 95 %; ms: until the first token; again: recomputed"
    )
    for one in result["verdicts"]:
        if one["decision"] != "passed over":
            stays = one["label"] in result["kept"]
            more_before = "; an earlier verdict by more questions stays" if stays else ""
            typer.echo(f"{one['label']}: {one['line']}{more_before}")
    if advice := more(result, minutes, most):
        typer.echo(advice)


def more(result: dict[str, Any], minutes: float, most: int) -> str | None:
    """Say what more time would bring; None if it would bring nothing."""
    asked = sum(result["questions"].values())
    undecided = [one for one in result["verdicts"] if one["decision"] == "undecided"]
    if not undecided and any(one["decision"] in ("verified", "refused") for one in result["verdicts"]):
        return None
    if result["settled"]:
        return (
            "What is undecided is no sooner and no better than what is verified: more questions would not "
            "change the choice."
            if undecided
            else "No strategy is left that more questions could verify."
        )
    if result["finished"] and result["failures"]:
        return "Run the same command again when what failed has passed: it is asked again."
    if result["finished"]:
        return (
            "All questions have been asked: more documents, a longer --questions, or a query log of the "
            "server (query_log_bytes) would decide more."
        )
    # of those that decide: a strategy was picked on others
    left = max((one["needed"] - one["figures"]["n"] for one in undecided if one["needed"]), default=0)
    if not asked or left <= 0:
        return "Run the same command again for more questions: what was compared is kept."
    about = max(1, round(minutes * left / asked))
    limit = f" --max-questions {asked + left}" if asked + left > most else ""
    return (
        f"Run it again with --minutes {about}{limit} for about {left} more questions: what was compared is "
        "kept."
    )


def _number(value: float | None, shape: str) -> str:
    return "" if value is None else f"{value:{shape}}"
