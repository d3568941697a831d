"""Which tokens of reused documents must be computed again? Rules for choosing them, compared at equal shares.

    python -m examples.reuse_rules MODEL DATA_DIR OUT.json --sets crossdoc mid_crossdoc --n 200 --rules concat static oracle --shares 2 5 10

No engine: a plain Llama in float32 that does what the composition path does. Every document's K and V are computed alone and moved to its
place in the prompt; the chosen tokens then run through the model again behind everything that stands before them, and write their new K
and V; the question is computed over the result. A question counts as right when every token of the gold answer and its end is the most
likely one under teacher forcing, which is the same as greedy decoding giving exactly these tokens.

Rules may use what is stored with a document at ingestion (passes of the document behind foreign texts, which know nothing of the query)
and the question's attention over the reused KV (one more pass, of the question's tokens alone). Rules whose names start with `oracle` use
the full prefill and only show what is possible; `cacheblend` sees the exact values of layer 1.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from examples.reuse_rules.model import Cache, Llama
from examples.reuse_rules.questions import Foreign, Outcome, Prompt, Reader, ingest, outcomes, rows_of
from examples.reuse_rules.rules import RULES, STAGED, Seen, choose

CONTEXTS = (("crossdoc", 490, 1200), ("crossdoc", 491, 1200), ("onehop", 490, 1200), ("needle", 490, 1200), ("crossdoc", 492, 400))


def question_attention(model: Llama, prompt: Prompt, cache: Cache) -> torch.Tensor:
    """[layers, heads, question tokens, N]: what the question's tokens attend to over the given KV."""
    tail = torch.arange(prompt.question, prompt.answer + 1, device=model.device)[None]
    weights = model.rows(prompt.ids, tail, cache, weights=True)[1]
    if weights is None:
        raise RuntimeError("the pass returned no attention")
    return weights[:, 0, :, :, : prompt.question]


def gradient(model: Llama, prompt: Prompt, cache: Cache, full: Cache) -> torch.Tensor:
    """[N] first-order change of the gold answer's log probability when a token's K and V become those of the full prefill."""
    with torch.enable_grad():
        k, v = cache.k.clone().requires_grad_(), cache.v.clone().requires_grad_()
        tail = torch.arange(prompt.question, len(prompt.ids) - 1, device=model.device)[None]
        hidden, _ = model.rows(prompt.ids, tail, Cache(k, v))
        gold = prompt.ids[prompt.answer + 1 :]
        logp = model.logits(hidden[0, -len(gold) :]).log_softmax(-1).gather(-1, gold[:, None]).sum()
        gk, gv = torch.autograd.grad(logp, (k, v))
    change = (gk * (full.k - cache.k)).sum((0, 1, 2, 4)) + (gv * (full.v - cache.v)).sum((0, 1, 2, 4))
    return change[: prompt.question].abs()


@torch.no_grad()
def look(model: Llama, prompt: Prompt, contexts: Sequence[Foreign], *, slope: bool = True) -> tuple[Cache, Seen, torch.Tensor, Outcome]:
    """Everything the rules see of one question, the reused cache, and what the full prefill answers. ``slope``: the gradient too."""
    cache, stored = ingest(model, prompt, contexts)
    total, n = len(prompt.ids), prompt.question
    steps = torch.arange(total, device=model.device)
    full = model.prefill(prompt.ids[None], steps[None])
    [outcome], reference = outcomes(model, prompt, full, torch.empty(1, 0, dtype=torch.long, device=model.device))
    segment = prompt.segment[:n]
    starts = torch.cat((torch.ones(1, dtype=torch.bool, device=model.device), segment[1:] != segment[:-1]))
    oracle = {
        "v": (full.v - cache.v).square().sum((1, 2, 4))[:, :n],
        "k": (full.k - cache.k).square().sum((1, 2, 4))[:, :n],
        "knorm": cache.k.square().sum((1, 2, 4))[:, :n].mean(1, True),
        "last": question_attention(model, prompt, full)[:, :, -1].mean(1).sum(0),
    }
    if slope:
        oracle["gradient"] = gradient(model, prompt, cache, full)
    offset = steps[:n] - torch.where(starts, steps[:n], 0).cummax(0).values
    seen = Seen(
        prompt, stored["sv"], stored["sk"], stored["mass"], stored["norm"], question_attention(model, prompt, cache), offset, oracle
    )
    return cache, seen, reference[0], outcome


@torch.no_grad()
def staged(model: Llama, seen: Seen, cache: Cache, documents: torch.Tensor, name: str, count: int) -> torch.Tensor:
    """Tokens of a two-stage rule; both stages together recompute ``count`` tokens."""
    first, part, second = STAGED[name]
    number = max(1, round(part * count))
    chosen = choose(RULES[first](seen), documents, number)
    written: list[Cache] = []
    model.rows(seen.prompt.ids, chosen[None], cache, written=written)
    place = chosen[None, None, None, :, None].expand(*cache.v.shape[:3], -1, cache.v.shape[4])
    repaired = Cache(cache.k.scatter(3, place, written[0].k), cache.v.scatter(3, place, written[0].v))
    again = replace(seen, attention=question_attention(model, seen.prompt, repaired))
    return choose(RULES[second](again), documents, max(1, count - number))


def measure(
    model: Llama,
    reader: Reader,
    rows: Sequence[dict[str, Any]],
    contexts: Sequence[Foreign],
    rules: Sequence[str],
    shares: Sequence[float],
    dump: int,
) -> tuple[dict[str, Any], list[dict[str, torch.Tensor]]]:
    """All rules at all shares over the rows. Returns the report of one set and, for the first ``dump`` rows, what the rules saw."""
    table: dict[str, dict[str, list[Outcome]]] = {}
    dumped = []
    started = time.perf_counter()
    tokens = questions = 0
    for i, row in enumerate(rows):
        prompt = reader.prompt(row)
        cache, seen, reference, full = look(model, prompt, contexts, slope=i < dump or any("gradient" in name for name in rules))
        documents = seen.groups > 0
        available = int(documents.sum())
        tokens, questions = tokens + available, questions + prompt.answer + 1 - prompt.question
        table.setdefault("full", {}).setdefault("100", []).append(full)
        none = torch.empty(1, 0, dtype=torch.long, device=model.device)
        table.setdefault("concat", {}).setdefault("0", []).append(outcomes(model, prompt, cache, none, reference)[0][0])
        plain = [name for name in rules if name in RULES]
        scores = {name: RULES[name](seen) for name in plain}
        for share in shares:
            count = max(1, round(share / 100 * available))
            choices = torch.stack([choose(scores[name], documents, count) for name in plain])
            found = outcomes(model, prompt, cache, choices, reference)[0]
            for name, outcome in zip(plain, found, strict=True):
                table.setdefault(name, {}).setdefault(f"{share:g}", []).append(outcome)
            for name in rules:
                if name in STAGED:
                    chosen = staged(model, seen, cache, documents, name, count)[None]
                    table.setdefault(name, {}).setdefault(f"{share:g}", []).append(outcomes(model, prompt, cache, chosen, reference)[0][0])
        if i < dump and tokens < 36_000:
            dumped.append(
                {
                    "ids": prompt.ids.short().cpu(),
                    "segment": prompt.segment.char().cpu(),
                    "question": torch.tensor([prompt.question, prompt.answer]),
                    "last": seen.attention[:, :, -1].half().cpu(),
                    "all": seen.attention.sum(2).mean(1).half().cpu(),
                    "sv": seen.sv.bfloat16().cpu(),
                    "mass": seen.mass.mean(2).half().cpu(),
                    "norm": seen.norm.bfloat16().cpu(),
                    "true": seen.oracle["v"].bfloat16().cpu(),
                    "gradient": seen.oracle["gradient"].cpu(),
                    "full_last": seen.oracle["last"].half().cpu(),
                }
            )
        if i % 20 == 19:
            print(f"  {i + 1} of {len(rows)}, {time.perf_counter() - started:.0f} s", flush=True)
    report: dict[str, Any] = {
        "n": len(rows),
        "document tokens": round(tokens / len(rows)),
        "question tokens, % of document tokens": round(100 * questions / tokens, 2),
        "seconds": round(time.perf_counter() - started, 1),
        "rules": {},
    }
    for name, curve in table.items():
        report["rules"][name] = {
            share: {
                "EM": round(100 * sum(o.right for o in found) / len(found), 1),
                "log p": round(sum(o.score for o in found) / len(found), 4),
                "KL": round(sum(o.kl for o in found) / len(found), 4),
                "right": "".join("01"[o.right] for o in found),
            }
            for share, found in curve.items()
        }
    return report, dumped


def check(model: Llama, folder: Path, prompt: Prompt, contexts: Sequence[Foreign]) -> dict[str, float]:
    """Largest differences of logits against transformers: full prefill, nothing and a random tenth of the tokens recomputed.

    The reference sees documents alone in one copy of the prompt, and a second copy of the recomputed tokens and the question that
    attends to the first copy's tokens that are not recomputed, and to itself.
    """
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(model.device).eval()
    cache = look(model, prompt, contexts)[0]
    n, total = prompt.question, len(prompt.ids)
    found: dict[str, float] = {}
    for name, share in (("nothing", 0.0), ("a tenth", 0.1), ("everything", 1.0)):
        redone = torch.rand(n, generator=torch.Generator().manual_seed(1)).to(model.device) < share
        where = torch.cat((redone.nonzero()[:, 0], torch.arange(n, total, device=model.device)))
        ids, position = torch.cat((prompt.ids[:n], prompt.ids[where])), torch.cat((torch.arange(n, device=model.device), where))
        second = torch.arange(len(ids), device=model.device) >= n
        segment = torch.cat((prompt.segment[:n], prompt.segment[where]))
        frozen = torch.cat((~redone, torch.ones(len(where), dtype=torch.bool, device=model.device)))
        before = position[None] <= position[:, None]
        alone = before & (segment[:, None] == segment[None]) & ~second[None]
        mask = torch.where(second[:, None], before & frozen[None], alone)
        bias = torch.where(mask, 0.0, torch.finfo(torch.float32).min)[None, None]
        with torch.no_grad():
            wanted = reference(ids[None], attention_mask=bias, position_ids=position[None]).logits[0, n:]
            hidden, _ = model.rows(prompt.ids, where[None], cache)
            found[name] = round(float((model.logits(hidden[0]) - wanted).abs().max()), 5)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sets", nargs="+", default=["crossdoc"], help="NAME, NAME:n or NAME:n:shares, as crossdoc:200:2,5,10")
    parser.add_argument("--n", type=int, default=200)
    parser.add_argument("--rules", nargs="+", default=["static", "v_quarter_linear"], help=f"of {', '.join([*RULES, *STAGED])}")
    parser.add_argument("--shares", nargs="+", type=float, default=[2, 5, 10, 15, 20, 30], help="percent of the documents' tokens")
    parser.add_argument("--dump", type=int, default=0, help="write what the rules saw of this many questions of every set to OUT.SET.pt")
    parser.add_argument("--foreign", type=Path, help="texts with lines of ==== between them: contexts that come first, as the server's do")
    arguments = parser.parse_args()
    for name in arguments.rules:
        if name not in RULES and name not in STAGED:
            parser.error(f"no rule {name!r}: choose from {', '.join([*RULES, *STAGED])}")
        if name.startswith(("framed", "likely", "other")) and arguments.foreign is None:
            parser.error(f"rule {name!r} needs --foreign")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, reader = Llama(arguments.model, device), Reader(arguments.model, device)
    texts = {f"{name} {row}": reader.foreign(rows_of(arguments.data, name)[row], tokens) for name, row, tokens in CONTEXTS}
    if arguments.foreign is not None:
        texts = reader.texts(arguments.foreign, 512) | texts
    contexts = []
    for ids in texts.values():
        positions = torch.arange(len(ids), device=device)[None]
        with torch.no_grad():
            contexts.append(Foreign(model.prefill(ids[None], positions), positions))
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "model": arguments.model.name,
        "contexts": {name: len(ids) for name, ids in texts.items()},
        "check": check(model, arguments.model, reader.prompt(rows_of(arguments.data, "crossdoc")[0]), contexts),
        "sets": {},
    }
    print(json.dumps(report["check"]), flush=True)
    if max(report["check"].values()) > 0.01:
        raise SystemExit(f"differs from transformers: {report['check']}")
    for spec in arguments.sets:
        name, n, some = [*spec.split(":"), "", ""][:3]
        rows = rows_of(arguments.data, name)[: int(n or arguments.n)]
        shares = [float(share) for share in some.split(",")] if some else arguments.shares
        report["sets"][name], dumped = measure(model, reader, rows, contexts, arguments.rules, shares, arguments.dump)
        arguments.out.write_text(json.dumps(report, indent=1))
        if dumped:
            torch.save(dumped, arguments.out.with_suffix(f".{name}.pt"))
        print(f"{name}: n={len(rows)}, {report['sets'][name]['seconds']} s", flush=True)
        for rule, curve in report["sets"][name]["rules"].items():
            print(f"{rule:28s} " + "  ".join(f"{share}: {c['EM']:5.1f} {c['log p']:6.3f}" for share, c in curve.items()), flush=True)


if __name__ == "__main__":
    main()
