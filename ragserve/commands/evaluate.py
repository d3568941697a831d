"""`ragserve eval`: quality of answers by strategy, over question sets or over one's own documents."""

from __future__ import annotations

import contextlib
import enum
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from ragserve.commands.options import ENGINE_SETTINGS, VERDICT_SETTINGS, with_settings
from ragserve.config import Settings, StrategyName
from ragserve.errors import InvalidRequest
from ragserve.eval.presets import BENCHMARKS, expanded, fixed_by
from ragserve.files import temporary_folder, write_text

if TYPE_CHECKING:
    from ragserve.client import Client
    from ragserve.engine.running_server import RunningServer
    from ragserve.eval.parallel import Plan

Line = dict[str, Any]
_PASSAGES, _TOKENS, _TURNS = 5, 24, 4  # for question sets
SETTINGS = ("data_dir", "embedder", "embed_device", *ENGINE_SETTINGS, *VERDICT_SETTINGS)


class EvalMode(enum.StrEnum):
    given = "given"
    retrieved = "retrieved"
    multiturn = "multiturn"


def register(app: typer.Typer) -> None:
    app.command("eval")(with_settings(evaluate, SETTINGS))


@temporary_folder()
def evaluate(
    settings: Settings,
    data: Annotated[
        list[str],
        typer.Option(help="Sets: .jsonl[.gz] files, or names of sets in --sets; repeatable, or with commas."),
    ],
    mode: Annotated[
        EvalMode,
        typer.Option(
            help="given: send each row's documents, in order. retrieved: ingest all documents, retrieve k. "
            "multiturn: dialogues of several rows, as sessions."
        ),
    ] = EvalMode.given,
    strategies: Annotated[
        str | None,
        typer.Option(
            help="Strategies with options: full,epic:first=16,cacheblend:share=0.15; rivals: full, the best "
            "passages, plain reuse, and published rules. Default: full,prefix, or the benchmark's."
        ),
    ] = None,
    benchmark: Annotated[
        str | None,
        typer.Option(
            help="Preset of system text, answer length and strategies, so that figures can be compared: "
            f"{', '.join(BENCHMARKS)}."
        ),
    ] = None,
    sets: Annotated[
        Path | None, typer.Option(help="Folder of the sets that --data names.", envvar="RAGSERVE_EVAL_SETS")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Questions of each set, spread evenly over it.")
    ] = None,
    half: Annotated[
        Literal["first", "second"] | None,
        typer.Option(help="Half of each set, by place: choose on the first, report the second."),
    ] = None,
    namespace: Annotated[
        str | None,
        typer.Option(
            "--namespace", "-n", help="Your own documents: ask this namespace, and judge passages, too."
        ),
    ] = None,
    documents: Annotated[
        Path | None,
        typer.Option(help="Your own documents: ask a namespace made of this folder's files for the run."),
    ] = None,
    k: Annotated[
        int | None,
        typer.Option(
            min=1, max=64, help="Passages retrieved for a question. Default: 5; of your own, the server's."
        ),
    ] = None,
    turns: Annotated[int, typer.Option(min=2, max=16, help="Questions of a dialogue of multiturn.")] = _TURNS,
    asked_at: Annotated[
        Literal["beginning", "middle", "end"],
        typer.Option(
            help="multiturn: where a question stands: at the end, or in a document of its own before "
            "(beginning) or among (middle) those that its turn brings."
        ),
    ] = "end",
    ahead: Annotated[
        int,
        typer.Option(
            min=1,
            help="multiturn: by how many turns the documents come before their question, in every other "
            "dialogue of a question set.",
        ),
    ] = 1,
    decode_budget: Annotated[
        int | None,
        typer.Option(
            min=128,
            help="multiturn: also decode within so many tokens over pages of exact KV, chosen by a window of "
            "queries, by the last one, by the prompt's end (as SnapKV), and the first and newest ones (as "
            "StreamingLLM). With --url its server needs --sparse-attention on. given, without --url but with "
            "--sparse-attention on: the setting of serve.",
        ),
    ] = None,
    session_budget: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            help="multiturn: also ask every strategy but full over so many tokens of the turns before the "
            "last one, compressed for each question; repeatable.",
        ),
    ] = None,
    refresh_turns: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            help="multiturn, without --url: also ask every composed strategy with the whole dialogue "
            "prefilled anew, exactly, every so many turns; repeatable.",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Longest answer in tokens. Default: 24; over your own, the server's."),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=256,
            help="Questions in flight in each worker. Default: 4, without a GPU 1, since others would count "
            "in the time to the first token.",
        ),
    ] = None,
    workers: Annotated[
        int,
        typer.Option(
            min=1,
            max=64,
            help="given, without --url: engines side by side. On one GPU they share its memory: give "
            "--max-total-tokens.",
        ),
    ] = 1,
    tier: Annotated[
        Literal["device", "host"],
        typer.Option(
            help="given, without --url: where composed strategies find their documents. host: their copies "
            "are part of the first token's time."
        ),
    ] = "device",
    work: Annotated[
        Path | None,
        typer.Option(
            help="given without --url, and your own documents: folder that keeps every answer. A run that "
            "was stopped continues from it."
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(help="Ask a running server over REST, without KL: REST sends no distributions."),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="RAGSERVE_API_KEY", help="The server's API key.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model of the engine or server that is started.")] = None,
    out: Annotated[
        Path | None,
        typer.Option("--json", dir_okay=False, help="File for the report; over REST, one file per set."),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False, help="File for the report as a web page; with --namespace or --documents."
        ),
    ] = None,
    write_gate: Annotated[
        bool,
        typer.Option(
            "--write-gate",
            help="Record the result in the data folder: the server refuses composed strategies without a "
            "good record.",
        ),
    ] = False,
    records: Annotated[
        Path | None, typer.Option(dir_okay=False, help="File for one JSON line per question and strategy.")
    ] = None,
) -> None:
    """Measure the answers of strategies over question sets. Exits with 1 if a request failed.

    Answers are decoded greedily and scored as SQuAD does: exact match and F1. Without --url, `given` starts
    its own engines and compares each strategy's next-token distribution with that of full prefill,
    `multiturn` does so turn by turn, and `retrieved` starts a server.

    --namespace or --documents evaluates RAG over your own documents, through a server: what the search finds,
    the answers, their citations, and the time. The questions' format is in docs/evaluation.md."""
    from ragserve.answering.auto import AUTO
    from ragserve.commands.serve_checks import check_engine
    from ragserve.eval.data import by_name, find
    from ragserve.eval.run import Options
    from ragserve.strategy_spec import parse

    own = namespace is not None or documents is not None
    known = [name for name in get_args(StrategyName) if name != AUTO or url or own]
    settings, max_new_tokens, strategies = fixed_by(
        benchmark, settings, max_new_tokens, strategies or ("" if benchmark else "full,prefix")
    )
    specs = parse(expanded(strategies), known)
    given_over_rest = mode is EvalMode.given and url is not None and not own
    if any(spec.chooses_passages for spec in specs) and (mode is EvalMode.multiturn or given_over_rest):
        raise InvalidRequest(
            "A choice of passages needs the search's order of the passages of a single question.",
            hint="Use --mode given without --url, --mode retrieved, --namespace or --documents.",
        )
    if url and model:
        raise InvalidRequest(
            "--model starts a server and --url names a running one.", hint="Give one of them."
        )
    if model:
        settings = settings.model_copy(update={"model": model})
    named = [find(name.strip(), sets) for part in data for name in part.split(",") if name.strip()]
    paths = list(by_name(named).values())
    if write_gate and (mode is not EvalMode.given or url is not None or own):
        raise InvalidRequest(
            "--write-gate needs the comparison with full prefill.",
            hint="Leave --url, --mode, --namespace and --documents away.",
        )
    if html and not own:
        raise InvalidRequest(
            "--html is for your own documents.", hint="Give --namespace or --documents, too."
        )
    if namespace and documents:
        raise InvalidRequest("--namespace and --documents say where to ask.", hint="Give one of them.")
    engines = mode is EvalMode.given and url is None and not own
    dialogues = mode is EvalMode.multiturn and not own
    ignored = {
        "--mode": own and mode is not EvalMode.given,
        "--work": work is not None and not (own or engines),
        "--workers": workers != 1 and not engines,
        "--tier": tier != "device" and not engines,
        "--turns": turns != _TURNS and not dialogues,
        "--asked-at": asked_at != "end" and not dialogues,
        "--ahead": ahead != 1 and not dialogues,
        "--decode-budget": decode_budget is not None
        and not (dialogues or (engines and settings.sparse_attention == "on")),
        "--session-budget": bool(session_budget) and not dialogues,
        "--refresh-turns": bool(refresh_turns) and not (dialogues and url is None),
        "--concurrency": concurrency is not None and dialogues and url is None,
        "--k": k is not None and not (own or mode is EvalMode.retrieved),
    }
    if unused := [name for name, is_ignored in ignored.items() if is_ignored]:
        raise InvalidRequest(
            f"{' and '.join(unused)} would change nothing in this run.",
            hint="Leave it away. `ragserve eval --help` says which runs it is for.",
        )
    if url is None:
        check_engine(settings, writes=write_gate)
    concurrency = concurrency or _in_flight(settings, url, api_key)
    system = settings.system_prompt if url else None  # a server that is started has it as its own
    if own:
        from ragserve.eval.own_report import OwnRun, evaluate_own, load_sets

        runs = [
            Options(spec.name, k, max_new_tokens, concurrency, spec.options, system=system) for spec in specs
        ]
        questions = load_sets(paths, limit, half)
        with _client(settings, url, api_key, keeps_data=namespace is not None) as client:
            lines = evaluate_own(client, questions, runs, OwnRun(namespace, documents, work, out, html))
    elif engines:
        from ragserve.eval.parallel import Plan

        if decode_budget is not None:
            settings = settings.model_copy(update={"decode_budget": decode_budget})
        plan = Plan(
            paths,
            specs,
            settings,
            limit,
            max_new_tokens or _TOKENS,
            concurrency,
            workers,
            half=half,
            compare=benchmark is None or write_gate,
            tier=tier,
            benchmark=benchmark,
        )
        lines = _engines(plan, work, out, write_gate=write_gate)
    elif dialogues and url is None:
        shape = turns, limit, asked_at, ahead, half
        budgets = decode_budget, session_budget or [], refresh_turns or []
        from ragserve.eval.dialogue_run import lead_dialogues

        lines = lead_dialogues(settings, paths, specs, shape, max_new_tokens or _TOKENS, budgets, out)
    else:
        from ragserve.eval.multiturn import shortened_runs
        from ragserve.eval.page_rivals import page_rivals
        from ragserve.eval.rest import evaluate_set, report_of

        runs = [
            Options(
                spec.name,
                k or _PASSAGES,
                max_new_tokens or _TOKENS,
                concurrency,
                spec.options,
                system=system,
            )
            for spec in specs
        ]
        if mode is EvalMode.multiturn:
            tokens = max_new_tokens or _TOKENS
            runs += shortened_runs(runs, session_budget or [])
            runs += [
                Options("prefix", _PASSAGES, tokens, concurrency, decode=decode, name=label)
                for label, decode in page_rivals(decode_budget).items()
            ]
        with _client(settings, url, api_key) as client:
            lines = []
            for path in paths:
                report = report_of(path, paths, out)
                lines += evaluate_set(
                    client,
                    path,
                    runs,
                    mode=mode.value,
                    turns=turns,
                    limit=limit,
                    out=report,
                    asked_at=asked_at,
                    ahead=ahead,
                    half=half,
                )
    if records is not None:
        write_text(records, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    if failed := [line["error"] for line in lines if line["error"]]:
        typer.secho(
            f"Some requests failed and count as wrong ({len(failed)}); the first: {failed[0]}",
            err=True,
            fg=typer.colors.RED,
        )
        raise typer.Exit(1)


def _in_flight(settings: Settings, url: str | None, api_key: str | None) -> int:
    """The default number of questions in flight, by what computes the answers."""
    if url is not None:
        from ragserve.client import Client

        with Client(url, api_key=api_key) as client:
            return 1 if client.info().engine.get("device") == "cpu" else 4
    if settings.engine_elsewhere:
        return 4
    import torch

    return 4 if torch.cuda.is_available() else 1


def _engines(plan: Plan, work: Path | None, out: Path | None, *, write_gate: bool) -> list[Line]:
    from ragserve.eval.console import progress
    from ragserve.eval.gate_records import measured
    from ragserve.eval.parallel import run
    from ragserve.eval.summary import write
    from ragserve.profiles import gate

    with contextlib.ExitStack() as stack:
        folder = work or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ragserve-eval-")))
        with progress("answers", None) as step:
            rows, served = run(plan, folder, step)
    report = write(plan, rows, served, out)
    if write_gate:
        place = plan.settings.data_dir / gate.FILE_NAME
        entries, margin = measured(report), plan.settings.verify_margin
        gate.record(place, served["engine"]["fingerprint"], entries)
        for label, entry in entries.items():
            short = "; ".join(entry.shortfalls(margin))
            typer.echo(f"{label}: {'verified' if entry.verifies(margin) else f'not verified ({short})'}")
        typer.echo(f"written: {place}")
    return rows


@contextlib.contextmanager
def _client(
    settings: Settings, url: str | None, api_key: str | None, *, keeps_data: bool = False
) -> Iterator[Client]:
    """A client of the server at ``url``, or of one that is started for the block with the settings that were
    given: on the data folder with ``keeps_data``, else on an empty one."""
    from ragserve.client import Client
    from ragserve.eval.served import OwnClient

    if url is not None:
        with Client(url, api_key=api_key, no_store=True) as client:
            yield client
        return
    data_dir = settings.data_dir if keeps_data else None
    with (
        _server(settings, api_key, data_dir) as server,
        OwnClient(server, api_key=api_key, no_store=True) as client,
    ):
        yield client


def _server(
    settings: Settings, api_key: str | None, data_dir: Path | None
) -> contextlib.AbstractContextManager[RunningServer]:
    from ragserve.engine.running_server import running_server

    given = (
        name for name in (*SETTINGS, "model") if name in settings.model_fields_set and name != "data_dir"
    )
    flags: dict[str, Any] = {name: getattr(settings, name) for name in given}
    if "engine_args" in flags:
        flags["engine_args"] = json.dumps(flags["engine_args"])
    if api_key:
        flags["api_key"] = api_key
    return running_server(warm_ingested=False, data_dir=data_dir, **flags)
