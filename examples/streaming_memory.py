"""What a second KV cache for streaming heads saves, which keeps sink and local pages only, and what it costs.

    python examples/streaming_memory.py OUT.json [SET.jsonl.gz ...] [--rows N] [--longest N] [--chunk N]
        [--pattern FILE] [--heads none,gates,even] [--model PATH]
    python examples/streaming_memory.py PATTERN.json --choose [--tokens N]

Streaming heads (LServe 3.3, 3.4) attend to the pages of their first 64 and latest 256 tokens in prefill and
in decoding, and their other pages go back to the pool. The caches and attention over them are those of
`sglang_ext.attention.two_caches`, in SGLang's classes for models with sliding windows. Without sets: pages
held, by prompt length; no model runs. With sets (as for gpu_decode_quality.py): greedy answers of the model,
which runs in transformers over these caches, beside dense ones. A CPU takes seconds to a minute a prompt.
Other rows in OUT stay. --choose makes a pattern file quickly."""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import torch

from ragserve.config import DEFAULT_MODEL
from ragserve.engine.compat import prepare
from ragserve.measuring import report

prepare()  # SGLang, on machines without a GPU

from sglang_ext.attention.calibration import GatedModel, make_passkeys  # noqa: E402
from sglang_ext.attention.streaming_heads import save_pattern  # noqa: E402
from sglang_ext.attention.two_cache_attention import TwoCacheAttention  # noqa: E402
from sglang_ext.attention.two_caches import TwoCaches  # noqa: E402

PAGE, SINK, LOCAL = 64, 64, 256
LENGTHS = tuple(1024 * 2**i for i in range(8))
DECODED = 256
ANSWER = 40  # tokens, at most
PATTERN = Path(__file__).parent / "results" / "streaming-memory-heads.json"
_ATTENTION = "ragserve_two_caches"
PAGES_NOTE = (
    "Pages of {page} tokens in all layers and KV heads; a page of some heads counts as their share. saved: "
    "percent of one pool's pages, the least while {decoded} tokens are decoded; held: the rest; peak: "
    "the most in prefill, with SGLang's overlapped scheduling, which frees a chunk's pages one chunk later."
)
ANSWERS_NOTE = (
    "right: exact match, percent. same: of the answers, those with dense attention's text, percent. held: "
    "pages at the end of the answer, percent of one pool's, mean. gates: the pattern file's heads; even: in "
    "each layer the half of the heads with the lowest gates."
)


def caches_of(streaming: torch.Tensor, head_dim: int, size: int, streaming_size: int) -> TwoCaches:
    return TwoCaches(streaming, head_dim, size, streaming_size, page=PAGE, sink=SINK, local=LOCAL)


class Model:
    """A Hugging Face model whose KV lies in `TwoCaches`."""

    def __init__(self, path: str) -> None:
        from transformers import AttentionInterface, AutoModelForCausalLM

        AttentionInterface.register(_ATTENTION, self._attend)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.model.set_attn_implementation(_ATTENTION)
        self.config = self.model.config.get_text_config()
        self._caches: TwoCaches | None = None
        self._attention: TwoCacheAttention | None = None

    @torch.no_grad()
    def answer(self, ids: list[int], caches: TwoCaches, stop: set[int], chunk: int) -> list[int]:
        """Prefill in chunks and decode greedily. Returns the new tokens without the one that ends them."""
        self._caches, found = caches, list[int]()
        self._attention = TwoCacheAttention(caches, self.config.num_attention_heads)
        step = ids
        while True:
            for at in range(0, len(step), chunk):
                token = self._forward(step[at : at + chunk])
            if token in stop or len(found) == ANSWER:
                return found
            found.append(token)
            step = [token]

    def _forward(self, ids: list[int]) -> int:
        if self._caches is None or self._attention is None:
            raise RuntimeError("a forward pass without caches")
        start = self._caches.tokens[0]
        self._caches.extend({0: len(ids)})
        if len(ids) > 1:
            self._attention.begin_extend({0: len(ids)})
        else:
            self._attention.begin_decode([0])
        positions = torch.arange(start, start + len(ids))[None]
        states = self.model.base_model(
            torch.tensor([ids]), position_ids=positions, use_cache=False
        ).last_hidden_state[0, -1]
        self._caches.release()
        return int(self.model.get_output_embeddings()(states).argmax())

    def _attend(
        self,
        module: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: Any,
        scaling: float,
        **_: Any,
    ) -> Any:
        if self._attention is None:
            raise RuntimeError("attention without caches")
        attend = self._attention.extend if q.shape[2] > 1 else self._attention.decode
        q, k, v = (each[0].transpose(0, 1).contiguous() for each in (q, k, v))
        return attend(module.layer_idx, q, k, v, scaling)[None], None


def even(gates: torch.Tensor) -> torch.Tensor:
    """Return bool [layers, kv_heads]: in each layer the half of the heads with the lowest gates."""
    order = gates.argsort(dim=1, stable=True).argsort(dim=1)
    return order < gates.shape[1] // 2


@torch.no_grad()
def choose(out: Path, path: str, tokens: int) -> None:
    """Write a pattern file by what each head costs when it alone streams, on one text of passkeys.

    `ragserve calibrate-heads` learns better ones, in a hundred times as long."""
    gated = GatedModel(path)
    text = make_passkeys(gated.encode, tokens, random.Random(0))
    want = gated.hidden(text)
    errors = torch.zeros(gated.shape)
    for layer in range(gated.shape[0]):
        for head in range(gated.shape[1]):
            gates = torch.ones(gated.shape)
            gates[layer, head] = 0
            with gated.gated(gates):
                errors[layer, head] = (gated.hidden(text) - want).square().mean() / want.square().mean()
        print(f"layer {layer}: {errors[layer].tolist()}", flush=True)
    how = "examples/streaming_memory.py --choose: gates are errors with one head streaming, over the largest"
    name = Path(path).name
    save_pattern(out, errors / errors.max(), share=0.5, model=name, tokens=len(text.ids), **{"made by": how})


def rounded(tokens: int) -> int:
    return -(-tokens // PAGE) * PAGE


def held_by_length(streaming: torch.Tensor, tokens: int, chunk: int) -> dict[str, Any]:
    """Prefill and decode without a model and count pages."""
    caches = caches_of(streaming, 8, rounded(tokens + DECODED), rounded(tokens + DECODED))
    peak, start = 0.0, 0
    while caches.tokens[0] < tokens:
        caches.release(tokens=start)  # what the chunk under way no longer reads
        start = caches.tokens[0]
        caches.extend({0: min(chunk, tokens - start)})
        peak = max(peak, caches.held())
    held, one = 0.0, caches.pages()[0]
    for _ in range(DECODED):
        caches.release()
        caches.extend({0: 1})
        held = max(held, caches.held() / caches.pages()[0])
    return {
        "tokens": tokens,
        "chunk": chunk,
        "pages of one pool": one,
        "held": round(held * one, 1),
        "saved": round(100 * (1 - held), 1),
        "peak": round(peak, 1),
        "peak saved": round(100 * (1 - peak / one), 1),
    }


def answers(
    given: argparse.Namespace,
    growing: report.GrowingReport,
    patterns: dict[str, torch.Tensor],
    earlier: list[dict[str, Any]],
) -> None:
    """Answer the sets' questions with each pattern; dense texts may be those of an ``earlier`` run."""
    from gpu_decode_quality import prompts

    from ragserve.answering.prompt import PromptBuilder
    from ragserve.measuring.metrics import exact_match

    builder, model = PromptBuilder.load(given.model), Model(given.model)
    ends = model.model.generation_config.eos_token_id
    stop = set(ends) if isinstance(ends, list) else {ends}
    shape = model.config.num_hidden_layers, model.config.num_key_value_heads
    if any(tuple(streaming.shape) != shape for streaming in patterns.values()):
        raise SystemExit(f"the pattern is for another model: this one has {shape} layers and KV heads")
    for path in given.sets:
        asked = [row for row in prompts(path, given.rows, builder) if len(row[0]) <= given.longest]
        if not asked:
            print(f"{path.name}: every prompt is too long", flush=True)
            continue
        label = path.name.split(".")[0]
        dense = [row["texts"] for row in earlier if (row["set"], row["streaming heads"]) == (label, "none")]
        room = rounded(max(len(ids) for ids, _, _ in asked) + ANSWER)
        mean = sum(len(ids) for ids, _, _ in asked) // len(asked)
        for name, streaming in patterns.items():
            caches = caches_of(
                streaming,
                model.config.head_dim,
                room,
                min(room, rounded(SINK + LOCAL + given.chunk) + 2 * PAGE),
            )
            right, held, texts, began = 0.0, 0.0, list[str](), time.monotonic()
            for ids, wanted, _ in asked:
                text = builder.tokenizer.decode(
                    model.answer(ids, caches, stop, given.chunk), skip_special_tokens=True
                )
                texts.append(text)
                right += exact_match(text, wanted)
                held += caches.held() / caches.pages()[0]
                caches.finish()
            if name == "none":
                dense = [texts]
            same = [text == before for text, before in zip(texts, dense[0], strict=True)]
            growing.add(
                {
                    "set": label,
                    "n": len(asked),
                    "prompt tokens": mean,
                    "streaming heads": name,
                    "right": round(100 * right / len(asked), 1),
                    "same": round(100 * sum(same) / len(same), 1),
                    "held": round(100 * held / len(asked), 1),
                },
                texts=texts,
                seconds=round(time.monotonic() - began, 1),
            )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("sets", nargs="*", type=Path)
    parser.add_argument("--rows", type=int, default=20)
    parser.add_argument("--longest", type=int, default=8000)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--pattern", type=Path, default=PATTERN)
    parser.add_argument("--heads", default="none,gates,even")
    parser.add_argument("--choose", action="store_true")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    given = parser.parse_args()
    if given.choose:
        choose(given.out, given.model, given.tokens)
        return
    read = json.loads(given.pattern.read_text(encoding="utf-8"))
    chosen = torch.tensor(read["streaming"], dtype=torch.bool)
    earlier = report.read_report(given.out)[1]
    if given.sets:
        growing = report.GrowingReport(
            "streaming answers", given.out, note=ANSWERS_NOTE, key=("set", "streaming heads"), earlier=earlier
        )
        growing.workload = {"model": Path(given.model).name, "chunk": given.chunk}
        patterns = {
            "none": torch.zeros_like(chosen),
            "gates": chosen,
            "even": even(torch.tensor(read["gates"])),
        }
        answers(given, growing, {name: patterns[name] for name in given.heads.split(",")}, earlier)
    else:
        note = PAGES_NOTE.format(page=PAGE, decoded=DECODED)
        growing = report.GrowingReport(
            "streaming memory", given.out, note=note, key=("tokens", "chunk"), earlier=earlier
        )
        growing.workload = {"pattern": given.pattern.name, "streaming share": float(chosen.float().mean())}
        for tokens in LENGTHS:
            growing.add(held_by_length(chosen, tokens, given.chunk))
    growing.show()


if __name__ == "__main__":
    main()
