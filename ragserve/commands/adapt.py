"""`ragserve adapt`: train a model to read documents that were prefilled apart."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ragserve.commands.options import with_settings
from ragserve.config import Settings

SETTINGS = (
    *("data_dir", "registry_url", "embedder", "embed_device", "top_k", "retrieval"),
    *("system_prompt", "kv_prefix"),
)
_SURE = 5  # points of F1 that may be lost before the table's loss needs a word of warning


def register(app: typer.Typer) -> None:
    app.command("adapt")(with_settings(adapt, SETTINGS))


def adapt(
    settings: Settings,
    model: Annotated[
        Path, typer.Argument(help="Folder of an instruction-tuned model of the Llama or Qwen family.")
    ],
    out: Annotated[Path, typer.Argument(help="Folder to write; it must not exist.")],
    namespace: Annotated[
        str | None,
        typer.Option("--namespace", "-n", help="Make questions about this namespace's passages."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="Questions with their passages, as JSON lines (docs/adapt.md), instead of --namespace.",
        ),
    ] = None,
    minutes: Annotated[
        float,
        typer.Option(min=0.1, help="Time to train, in all runs together; questions and guards not counted."),
    ] = 20,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps to train, if they come sooner.")] = None,
    questions: Annotated[int, typer.Option(min=50, help="Most questions to make of a namespace.")] = 4000,
    held_out: Annotated[
        int,
        typer.Option(
            min=10,
            help="Questions to measure with, at most a fifth of all; 100 of them during training, too.",
        ),
    ] = 400,
    rank: Annotated[int, typer.Option(min=1, max=256, help="Rank of the adapter.")] = 16,
    rate: Annotated[float, typer.Option(min=0.0, help="Learning rate, above 0.")] = 2e-4,
    batch: Annotated[int, typer.Option(min=1, max=512, help="Questions of a step.")] = 16,
    every: Annotated[
        int, typer.Option(min=1, help="Steps between checkpoints, each with a measure of held-out KL.")
    ] = 20,
    answer_tokens: Annotated[
        int, typer.Option(min=1, max=256, help="Longest answer that is compared, in tokens.")
    ] = 32,
    pack_tokens: Annotated[
        int,
        typer.Option(
            min=0, help="Tokens that are computed at once, 512 or more. 0: 8,192 on a GPU, 2,048 without one."
        ),
    ] = 0,
    seed: Annotated[int, typer.Option(help="Seed of all that is drawn.")] = 0,
    work: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the run's own files, empty or not there; the same command goes on from there, "
            "but until all questions are made it begins anew with them. Default: OUT.work."
        ),
    ] = None,
) -> None:
    """Train a model so that it answers from documents that were prefilled apart as from whole prompts.

    The model teaches itself: over the whole prompt it says what it is to say over composed documents, so no
    answer has to be known. Writes a model folder for --model with the merged weights, the adapter, and
    ragserve-adapt.json: the figures before and after. Writes nothing where it is shown that
    whole prompts are answered worse than before. Needs the extra `train`."""
    from ragserve.adapt.adaptation import Adaptation
    from ragserve.adapt.adaptation import adapt as run
    from ragserve.adapt.model_folder import check_out
    from ragserve.adapt.training import TrainingOptions
    from ragserve.errors import InvalidRequest
    from ragserve.progress_lines import progress_lines
    from ragserve.retrieval.document_store import open_store

    if (namespace is None) is (data is None):
        raise InvalidRequest("adapt needs questions.", hint="Give either --namespace or --data.")
    if namespace is not None:
        with open_store(settings) as store:
            store.namespace(namespace)  # before a model is loaded for nothing
    check_out(out, model)  # "." and "/" have no name to make another of
    options = TrainingOptions(60 * minutes, steps, batch, every, rate, answer_tokens)
    job = Adaptation(
        model,
        out,
        work or out.with_name(f"{out.name}.work"),
        options,
        namespace or "",
        data,
        questions,
        held_out,
        rank,
        seed,
        pack_tokens,
    )
    with progress_lines() as now:
        record = run(settings, job, now)
    _print(record)
    typer.echo(f"written to {out}; serve it with: ragserve serve --model {out}")


def _print(record: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    before, after, lost = record["before"], record["after"], record["lost"]
    table = Table(
        caption=f"held-out questions; {record['questions']:,} others were trained with. "
        "In brackets: lost at least and at most, at 95 % each"
    )
    for column in ("", "before", "after", "lost", "n"):
        table.add_column(column, justify="left" if not column else "right")

    def add(label: str, name: str, n: str, digits: int, loss: str = "") -> None:
        table.add_row(label, f"{before[name]:.{digits}f}", f"{after[name]:.{digits}f}", loss, n)

    add("F1, whole prompts", "whole_f1", str(after["questions"]), 1, _loss(lost["whole_f1"]))
    add("F1, nothing recomputed", "composed_f1", str(after["questions"]), 1)
    if after["unanswerable"]:
        n = str(after["unanswerable"])
        add("refused, no answer, %", "refused_percent", n, 0, _loss(lost["refused"]))
    add("perplexity of text", "perplexity", f"{after['text_tokens']:,}", 2)
    for name, label in (("composed", "KL a token, composed"), ("whole", "KL a token, whole prompts")):
        kl = (f"{record[when][name]:.3f}" for when in ("kl_before", "kl_after"))
        table.add_row(label, *kl, "", str(record["kl_questions"]))
    Console().print(table)
    if record["recovered"] is not None:
        typer.echo(f"{100 * record['recovered']:.0f} % of what composed prompts lost is recovered")
    if after["unanswerable"] and not before["refused_percent"]:
        typer.echo(
            "the base refused nothing, as far as English words tell: whether refusals are lost is not known"
        )
    most = lost["whole_f1"]["at_most"]
    if most > _SURE:
        typer.echo(
            f"so few questions do not show how good it is: whole prompts may lose {most:.0f} points of F1"
        )


def _loss(lost: dict[str, float]) -> str:
    return f"{lost['points']:.1f} [{lost['at_least']:.1f}, {lost['at_most']:.1f}]"
