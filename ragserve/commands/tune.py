"""`ragserve tune`: verify strategies on one's own documents, without labels, and measure what they cost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from ragserve.commands.options import DECODE_SETTINGS, ENGINE_SETTINGS, Namespace, with_settings
from ragserve.config import Settings, StrategyName
from ragserve.strategy_spec import CANDIDATES
from ragserve.verification import MAX_TOKENS, MOST_QUESTIONS

SETTINGS = (
    *("model", "data_dir", "registry_url", "embedder", "embed_device", "top_k", "retrieval", "system_prompt"),
    *("kv_disk_bytes", *ENGINE_SETTINGS, "sparse_attention", *DECODE_SETTINGS),
)

_KINDS = {
    "asked": "asked by users",
    "given": "given",
    "written": "written by the model",
    "cloze": "sentences with a gap",
}


def register(app: typer.Typer) -> None:
    app.command("tune")(with_settings(tune, SETTINGS))


def tune(
    settings: Settings,
    namespace: Namespace = "default",
    minutes: Annotated[
        float, typer.Option(min=1, help="Time to spend, engine start included. A later run goes on.")
    ] = 10,
    questions: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="Questions to ask: a text file with one a line, or JSON lines with a `question` each. "
            "Default: those of users in the server's query log, if it keeps one, then questions about the "
            "namespace's own chunks.",
        ),
    ] = None,
    strategies: Annotated[
        str, typer.Option(help="Candidates: composed strategies with options, as for eval.")
    ] = CANDIDATES,
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
) -> None:
    """Verify composed strategies on your own documents, without labels.

    Asks questions about a namespace as /rag/query does, lets full prefill answer, and leads each strategy
    along that answer: how far are its distributions from those of full prefill, token by token? Writes the
    gate's record and the cost profile that strategy auto needs, and samkv's profile where there is none and,
    with --sparse-attention on, from which length sparse decoding pays. Stop a server on the same machine
    first: it would disturb the measurement."""
    from ragserve.best_passages import NOT_COMPOSED
    from ragserve.commands.serve_checks import check_engine
    from ragserve.eval.console import progress
    from ragserve.retrieval.document_store import open_store
    from ragserve.strategy_spec import check_read_whole, parse
    from ragserve.verification.calibration.tune_process import tune as run

    names = [name for name in get_args(StrategyName) if name not in (*NOT_COMPOSED, "auto")]
    specs = parse(strategies, names)
    check_read_whole(specs)
    labels = [spec.label for spec in specs]
    with open_store(settings) as store:
        store.namespace(namespace)  # before an engine is started for nothing
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
    _print(result, namespace, minutes, most)
    typer.echo(f"written to {settings.data_dir}; a running server reads it at once")


def _print(result: dict[str, Any], namespace: str, minutes: float, most: int) -> None:
    from rich.console import Console
    from rich.table import Table

    counts = ", ".join(f"{count} {_KINDS[kind]}" for kind, count in result["questions"].items()) or "none"
    typer.echo(f"{namespace}: of {result['tried']} questions tried: {counts}; {result['costs']}")
    if result["decode"]:
        typer.echo(result["decode"])
    table = Table(
        caption="a token of full's answers: KL in nats, regret and agreement in percent; <=: at 95 %; "
        "ms: until the first token; again: recomputed"
    )
    for column in ("strategy", "KL", "regret", "agreement", "ms", "kept %", "again %", "verdict"):
        table.add_column(column, overflow="fold", min_width=9 if column == "verdict" else None)
    for one in result["verdicts"]:
        figures = one["figures"]
        table.add_row(
            one["label"],
            _with_bound(figures["answer_kl"], figures["answer_kl_bound"], ".4f"),
            _with_bound(figures["answer_regret"], figures["answer_regret_bound"], ".2f"),
            "" if figures["answer_agrees"] is None else f"{figures['answer_agrees']:.1f}",
            "" if one["ttft_ms"] is None else f"{one['ttft_ms']:.0f}",
            "" if figures["kept"] is None else f"{figures['kept']:.0f}",
            "" if figures["recomputed"] is None else f"{figures['recomputed']:.0f}",
            one["decision"],
        )
    Console().print(table)
    for one in result["verdicts"]:
        if one["decision"] != "verified":
            typer.echo(f"{one['label']}: {one['line']}")
    if advice := more(result, minutes, most):
        typer.echo(advice)


def more(result: dict[str, Any], minutes: float, most: int) -> str | None:
    """Say what more time would bring; None if it would bring nothing."""
    asked = sum(result["questions"].values())
    wanted = [one["needed"] for one in result["verdicts"] if one["decision"] == "undecided"]
    if not wanted and result["verdicts"]:
        return None
    if result["finished"]:
        return (
            "All questions have been asked: more documents, a longer --questions, or a query log of the "
            "server (query_log_bytes) would decide more."
        )
    needed = max((count for count in wanted if count), default=0)
    if not asked or not needed:
        return "Run the same command again for more questions: what was compared is kept."
    about = max(1, round(minutes * (needed - asked) / asked))
    limit = f" --max-questions {needed}" if needed > most else ""
    return (
        f"Run it again with --minutes {about}{limit} for about {needed - asked} more questions: what was "
        "compared is kept."
    )


def _with_bound(mean: float | None, bound: float | None, shape: str) -> str:
    return "" if mean is None or bound is None else f"{mean:{shape}} <= {bound:{shape}}"
