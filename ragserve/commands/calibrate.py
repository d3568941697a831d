"""`ragserve calibrate`: find a model's samkv profile, fit the cost model that strategy ``auto`` chooses by,
find the lengths from which sparse prefill and decoding are faster, what they cost in answers, and which
heads may stream."""

from __future__ import annotations

import shutil
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from ragserve.commands.calibrate_decode import calibrate_decode
from ragserve.commands.calibrate_heads import calibrate_heads
from ragserve.commands.calibrate_sparse import calibrate_sparse
from ragserve.commands.options import DECODE_SETTINGS, ENGINE_SETTINGS, say, with_settings
from ragserve.config import Settings, StrategyName
from ragserve.errors import InvalidRequest
from ragserve.files import temporary_folder

if TYPE_CHECKING:
    from ragserve.engine.local import LocalEngine
    from ragserve.strategy_spec import StrategySpec
    from ragserve.verification.calibration.namespace_weights import NamespacePassage
    from ragserve.verification.costs import CostSchedule

SETTINGS = (
    *("model", "data_dir", "registry_url", "embedder", "embed_device", "system_prompt", "kv_disk_bytes"),
    "kv_prefix",  # verdicts depend on it, and costs are those of what is verified
    *ENGINE_SETTINGS,
    *("sparse_attention", "prefill_mode", "prefill_alpha", "prefill_observe", "prefill_dense_last"),
    "prefill_kernels",  # of dense prefill, which sparse prefill is measured against
    *(name for name in DECODE_SETTINGS if name != "sparse_attention"),
)


class Part(StrEnum):
    """The part to measure."""

    all = "all"
    samkv = "samkv"
    costs = "costs"
    prefill = "prefill"
    decode = "decode"
    heads = "heads"
    sparse = "sparse"


def register(app: typer.Typer) -> None:
    app.command("calibrate")(with_settings(calibrate, SETTINGS))


@temporary_folder()
def calibrate(
    settings: Settings,
    part: Annotated[
        Part,
        typer.Option(
            help="samkv: find the model's profile anew. costs: fit the cost model. all: find the profile if "
            "there is none, then fit the costs. prefill, decode: find the length from which sparse prefill "
            "or decoding is faster than dense. heads: learn which KV heads may stream. sparse: ask the "
            "questions of --data densely and sparsely; --sparse-attention auto takes what loses no answers."
        ),
    ] = Part.all,
    strategies: Annotated[
        str | None,
        typer.Option(help="costs: composed strategies, as for eval. Default: those verified for the model."),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=64, help="costs, prefill, decode: longest prompt in tokens. Default: what the engine takes."
        ),
    ] = None,
    document_tokens: Annotated[int, typer.Option(min=16, help="costs: tokens of each document.")] = 256,
    repeats: Annotated[
        int, typer.Option(min=1, help="costs, prefill: measurements of each case, after one warm-up.")
    ] = 3,
    sets: Annotated[int, typer.Option(min=1, help="samkv: sets of documents to ask about.")] = 4,
    questions: Annotated[
        int, typer.Option(min=1, help="samkv: questions of each of the four kinds, on every set.")
    ] = 6,
    namespace: Annotated[
        str | None,
        typer.Option(
            "--namespace",
            "-n",
            help="samkv: learn the weights of the signals on this namespace's passages; they are used if "
            "they keep more than the built-in ones on others of its documents. Default: the built-in ones.",
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="decode, sparse: requests that decode at once.")] = 4,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=8,
            help="decode: tokens that a request generates (96). heads: tokens of the longest text (1,536).",
        ),
    ] = None,
    data: Annotated[
        list[Path] | None, typer.Option(help="sparse: files of question sets, .jsonl[.gz]; repeatable.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="sparse: questions of each set, spread evenly over it.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="heads: pattern file to write, for --decode-heads.")
    ] = None,
    share: Annotated[
        float, typer.Option(min=0, max=1, help="heads: share of the heads that the pattern lets stream.")
    ] = 0.5,
    steps: Annotated[int, typer.Option(min=1, help="heads: training steps, one text each.")] = 200,
    device: Annotated[str, typer.Option(help="heads: torch device; auto: cuda if there is one.")] = "auto",
) -> None:
    """Find how a model is served best on this machine, and write it where `serve` reads it.

    The samkv profile (stable layers and retrieval heads) belongs to the model, and may be copied into its
    folder. The costs (time to the first token of every strategy) and the lengths from which prefill and
    decoding are sparse belong to this machine. All are written to the data folder, but for the pattern of
    streaming heads, which goes to --out. Stop a server on the same machine first: it would disturb the
    measurement."""
    if part == Part.decode:
        _at_least("max_tokens", max_tokens, 1024, part)
        calibrate_decode(settings, batch=batch, max_tokens=max_tokens, tokens=tokens or 96)
        return
    if part == Part.sparse:
        calibrate_sparse(settings, data or [], limit, batch)
        return
    if part == Part.heads:
        if out is None:
            raise InvalidRequest(
                "--part heads writes a pattern file.", hint="Name it with --out.", param="out"
            )
        _at_least("tokens", tokens, 768, part)
        calibrate_heads(
            out, model=settings.model, share=share, steps=steps, tokens=tokens or 1536, device=device
        )
        return
    from ragserve.best_passages import NOT_COMPOSED
    from ragserve.commands.serve_checks import check_engine
    from ragserve.engine.offline import run_once
    from ragserve.engine.server_args import resolve_sparse_attention
    from ragserve.profiles.samkv import FILE_NAME
    from ragserve.strategy_spec import check_read_whole, parse
    from ragserve.verification.calibration.prefill_times import check_longest
    from ragserve.verification.costs import CostSchedule

    names = [name for name in get_args(StrategyName) if name not in (*NOT_COMPOSED, "auto")]
    given = parse(strategies, names) if strategies else []
    check_read_whole(given)
    schedule = CostSchedule(max_tokens, document_tokens, repeats)
    if namespace and part != Part.samkv:
        raise InvalidRequest("--namespace is for --part samkv.", hint="Add --part samkv.", param="namespace")
    if part == Part.prefill and max_tokens is not None:
        check_longest(max_tokens)
    check_engine(settings)
    settings, _ = resolve_sparse_attention(settings)  # its record is in the data folder
    passages = _passages(settings, namespace) if namespace else []

    async def work(engine: LocalEngine) -> None:
        if part == Part.prefill:
            await _prefill(settings, engine, max_tokens, repeats)
            return
        new_profile = part == Part.samkv or (
            part == Part.all and not engine.info.samkv and not engine.info.only_exact
        )
        if new_profile:
            await _samkv(settings, engine, sets, questions, passages)
        if part != Part.samkv:
            await _costs(settings, engine, given, schedule, new_profile=new_profile)

    with tempfile.TemporaryDirectory(prefix="ragserve-calibrate-") as folder:
        # A temporary cache folder: a running server may own that of the data folder.
        if (settings.data_dir / FILE_NAME).exists():
            shutil.copy(settings.data_dir / FILE_NAME, folder)
        own: dict[str, Any] = {"data_dir": Path(folder)}
        if part == Part.prefill:
            own |= {"sparse_attention": "on", "decode_mode": "dense"}
        run_once(settings.model_copy(update=own), work, measures=False)


def _at_least(name: str, tokens: int | None, least: int, part: Part) -> None:
    if tokens is not None and tokens < least:
        flag = "--" + name.replace("_", "-")
        raise InvalidRequest(
            f"{flag} {tokens} is too short for --part {part}: give {least} or more.", param=name
        )


def _passages(settings: Settings, namespace: str) -> list[NamespacePassage]:
    from ragserve.retrieval.document_store import open_store
    from ragserve.verification.calibration.namespace_weights import drawn_passages

    with open_store(settings) as store:
        return drawn_passages(store, namespace)


async def _samkv(
    settings: Settings, engine: LocalEngine, sets: int, questions: int, passages: list[NamespacePassage]
) -> None:
    from ragserve.verification.calibration.namespace_weights import learn_on
    from ragserve.verification.calibration.samkv import ProbeSchedule, find_and_save, table

    learned = await learn_on(settings, engine, passages, say) if passages else None
    schedule = ProbeSchedule(sets=sets, questions=questions)
    found, place = await find_and_save(settings, engine, schedule, say, learned)
    for line in [*table(found), *(learned.lines() if learned else [])]:
        typer.echo(line)
    typer.echo(f"written: {place}")


async def _costs(
    settings: Settings,
    engine: LocalEngine,
    given: list[StrategySpec],
    schedule: CostSchedule,
    *,
    new_profile: bool,
) -> None:
    """Measure and fit costs. With a ``new_profile``, which the running engine does not have and nothing was
    verified with, samkv is left out by default."""
    from ragserve.profiles.costs import FILE_NAME, add_costs, fit
    from ragserve.profiles.gate import EXACT, Gate
    from ragserve.strategy_spec import parse
    from ragserve.verification.costs import measure
    from ragserve.verification.report import measured_on

    info = engine.info
    gate = Gate.of(settings, **info.gate_identity)
    verified = [parse(label)[0] for label in gate.to_price() if label != EXACT]
    specs = given or [spec for spec in verified if spec.name != "samkv" or not new_profile]
    if not specs:
        why, hint = (
            "No composed strategy is verified for this model, so auto has nothing to choose from.",
            "Run ragserve tune, or eval --write-gate first, or name strategies with --strategies.",
        )
        if new_profile:
            say(f"No costs were measured. {why} {hint}")
            return
        raise InvalidRequest(why, hint=hint)
    samples = await measure(engine, specs, schedule, say)
    costs = fit(samples, **measured_on(settings.model))
    place = settings.data_dir / FILE_NAME
    add_costs(place, info.fingerprint, info.device, costs)
    typer.echo(f"{len(samples)} measurements, mean error of the fit {costs.error:.1%}")
    for label in costs.composed:
        for tokens in (1024, 4096):
            composed = costs.composed_ms(label, [(tokens, "device")])
            typer.echo(
                f"{label}, {tokens} tokens on the device: {composed:.0f} ms; "
                f"exact prefill: {costs.exact_ms(tokens):.0f} ms"
            )
    typer.echo(f"written: {place}")


async def _prefill(settings: Settings, engine: LocalEngine, max_tokens: int | None, repeats: int) -> None:
    """Measure dense and sparse prefill by length, and write the length from which sparse is on."""
    from ragserve.answering.prompt import PromptBuilder
    from ragserve.profiles.prefill_crossover import FILE_NAME, PREFILL, PrefillProfile, on_from, options_of
    from ragserve.verification.calibration.prefill_times import measure
    from ragserve.verification.report import measured_on

    options = options_of(settings)
    builder = PromptBuilder.load(engine.info.tokenizer)
    points = await measure(engine, builder, options, max_tokens=max_tokens, repeats=repeats, report=say)
    found = PrefillProfile(on_from(points), options, tuple(points), **measured_on(settings.model))
    place = settings.data_dir / FILE_NAME
    PREFILL.save(place, engine.info.fingerprint, found)
    if found.dense_below is None:
        typer.echo(f"sparse prefill stays off: it does not gain at {points[-1].tokens} tokens")
    else:
        typer.echo(f"dense up to {found.dense_below} tokens")
    typer.echo(f"written: {place}")
