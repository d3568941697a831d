"""`ragserve bench`: run one benchmark or all of them; each prints its table and writes its JSON."""

from __future__ import annotations

import enum
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from ragserve.config import DEFAULT_MODEL
from ragserve.errors import InvalidRequest
from ragserve.files import temporary_folder
from ragserve.setting_groups.ingestion import IndexType


class Name(enum.StrEnum):
    """The benchmarks, in the order in which ``all`` runs them: each a module of ``ragserve.bench`` with
    ``run(out_dir, quick=...)``, except ``kernels``, which stands for both kernel benchmarks, and ``all``."""

    INDEX = "index"
    RETRIEVAL = "retrieval"
    DIALOGUE = "dialogue"
    RERANK = "rerank"
    LEXICAL = "lexical"
    SELECTION = "selection"
    INGEST = "ingest"
    API = "api"
    CONTEXT = "context"
    REPLAY = "replay"
    LOAD = "load"
    FLEET = "fleet"
    KERNELS_COMPOSE = "kernels-compose"
    KERNELS_DECODE = "kernels-decode"
    KERNELS = "kernels"
    ALL = "all"


_KERNELS = (Name.KERNELS_COMPOSE, Name.KERNELS_DECODE)  # both halves of `kernels`; only these have parts
# `all` leaves them out: kernels measure nothing without a GPU, the others need data or a verified strategy.
_BY_NAME_ONLY = (
    Name.ALL,
    Name.KERNELS,
    Name.DIALOGUE,
    Name.RERANK,
    Name.LEXICAL,
    Name.SELECTION,
    Name.REPLAY,
    Name.LOAD,
    Name.FLEET,
    *_KERNELS,
)


def register(app: typer.Typer) -> None:
    app.command("bench")(bench)


@temporary_folder()
def bench(
    name: Annotated[Name, typer.Argument(help="Which one.")],
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Small sizes: takes seconds instead of minutes; the figures prove nothing."
        ),
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for the JSON.")] = Path("benchmarks/results"),
    no_write: Annotated[bool, typer.Option("--no-write", help="Print only.")] = False,
    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="Repeatable. retrieval, rerank: a folder in BEIR's layout "
            "(corpus.jsonl, queries.jsonl, qrels/test.tsv). dialogue: dialogues in MTRAG's layout, besides "
            "those over the example corpus (.jsonl[.gz]). lexical: such a folder, and articles "
            "({title, text}; .jsonl, .jsonl.xz). "
            "selection, rerank: a question set, as for `ragserve eval`. "
            "kernels-decode: a question set (.jsonl, .jsonl.gz) with long documents, whose "
            "queries and keys are measured. "
            'replay, load, fleet: NAME.trace.jsonl, one {"doc_ids": [...]} per line, beside '
            'NAME.docs.jsonl[.gz], one {"id", "text"} per line.'
        ),
    ] = None,
    part: Annotated[
        list[str] | None,
        typer.Option(
            help="kernels-*: measure only this part; fleet: replay only by this policy; repeatable. The "
            "file's other rows are kept."
        ),
    ] = None,
    model: Annotated[
        str, typer.Option(help="kernels-decode: the model whose queries and keys are measured.")
    ] = DEFAULT_MODEL,
    queries: Annotated[
        int,
        typer.Option(min=1, help="replay, load, fleet: queries drawn from the trace."),
    ] = 120,
    questions: Annotated[
        int,
        typer.Option(min=0, help="rerank: questions, spread over each collection; 0: all."),
    ] = 0,
    reranker: Annotated[
        list[str] | None,
        typer.Option(help="rerank: a sentence-transformers CrossEncoder to measure, too; repeatable."),
    ] = None,
    share: Annotated[
        list[float] | None,
        typer.Option(
            help="replay: KV slots as a share of the documents' tokens; repeatable. The file's rows of "
            "other shares are kept."
        ),
    ] = None,
    passages: Annotated[
        int,
        typer.Option(
            min=0,
            help="load: passages per query; further ones are taken from the next queries. 0: as many as the "
            "trace has.",
        ),
    ] = 0,
    strategies: Annotated[
        str | None,
        typer.Option(
            help="load: strategies to compare, written as for `ragserve eval`; full first, as the reference."
        ),
    ] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="fleet: simulate 8, 64 and 512 workers and 1M documents.")
    ] = False,
    workers: Annotated[
        list[int] | None,
        typer.Option(min=1, help="fleet: number of workers, simulated or real (1, 2 and 4); repeatable."),
    ] = None,
    shared: Annotated[
        bool,
        typer.Option("--shared", help="fleet: with a store of documents' KV that the workers share."),
    ] = False,
    index_types: Annotated[
        str, typer.Option(help="retrieval: index types to compare, separated by commas.")
    ] = "flat",
) -> None:
    """Run a benchmark; each figure is measured beside its rival in the same run."""
    types = tuple(kind.strip() for kind in index_types.split(",") if kind.strip())
    if unknown := [kind for kind in types if kind not in get_args(IndexType)]:
        raise InvalidRequest(
            f"Unknown index type {unknown[0]!r}.", hint=f"Choose from {', '.join(get_args(IndexType))}."
        )
    if part and name not in (*_KERNELS, Name.FLEET):
        raise InvalidRequest(
            "--part selects parts of one kernel benchmark, or policies of a fleet.",
            hint="Name kernels-compose, kernels-decode or fleet.",
        )
    given: dict[str, dict[str, Any]] = {
        "retrieval": {"data": data, "index_types": types},
        "dialogue": {"data": data},
        "rerank": {"data": data, "questions": questions, "rerankers": reranker},
        "lexical": {"data": data},
        "selection": {"data": data},
        "kernels-compose": {"parts": part},
        "kernels-decode": {"parts": part, "model": model, "data": data},
        "replay": {"traces": data, "n_queries": queries, "shares": share},
        "fleet": {
            "simulate_only": simulate,
            "sizes": workers,
            "shared": shared,
            "traces": data,
            "n_queries": queries,
            "only": part,
        },
        "load": {"traces": data, "n_queries": queries, "passages": (passages,), "strategies": strategies},
    }
    chosen = list(_KERNELS) if name is Name.KERNELS else [name]
    if name is Name.ALL:
        chosen = [each for each in Name if each not in _BY_NAME_ONLY]
        if not data:
            typer.secho(
                "retrieval is left out: it needs collections, --data DIR.", err=True, fg=typer.colors.YELLOW
            )
            chosen.remove(Name.RETRIEVAL)
    for each in chosen:
        path = each.value.replace("-", "." if each in _KERNELS else "_")
        module = import_module(f"ragserve.bench.{path}")
        options = {key: value for key, value in given.get(each.value, {}).items() if value}
        module.run(None if no_write else out, quick=quick, **options)
