"""Records a real model's queries, keys and values over long prompts, as decode batches for the benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragserve.answering.prompt import PromptBuilder, PromptDocument
from ragserve.bench.kernels.decode_cases import DecodeCase, Layer, add_summaries, slots_of
from ragserve.errors import InvalidRequest
from ragserve.eval import data as sets

if TYPE_CHECKING:
    import torch

ATTENTION = "ragserve_record"
CANDIDATES = 64
ROOM = 64  # tokens of the model's context left for the answer


@dataclass(frozen=True)
class Recorded:
    """A prompt and ``steps`` greedily decoded tokens; K and Q are rotated as in the model."""

    q: torch.Tensor
    """[steps, layers, heads, head_dim]: of the token decoded at each step, which attends to ``prompt + step +
    1`` tokens.
    """
    k: torch.Tensor
    """[layers, prompt + steps, kv_heads, head_dim], ``v`` likewise."""
    v: torch.Tensor
    prompt: int
    """Tokens."""

    def tokens(self, step: int) -> int:
        return self.prompt + step + 1


def long_prompts(model: str, path: Path, *, count: int) -> list[list[int]]:
    """The longest ``count`` prompts of ``CANDIDATES`` rows spread over a question set, as the server lays
    them out.

    Raises:
        InvalidRequest: the file is no question set. Unavailable: no tokenizer.
    """
    from transformers import AutoConfig

    builder = PromptBuilder.load(model)
    room = int(AutoConfig.from_pretrained(model).max_position_embeddings) - ROOM
    prompts = []
    for row in sets.load(path, max(CANDIDATES, count)):
        documents = [PromptDocument(each.key, each.title, each.text) for each in row.documents]
        prompts.append(builder.build(row.question, documents, max_prompt_tokens=room).input_ids)
    return sorted(prompts, key=len, reverse=True)[:count]


def record(
    model: str, prompts: Sequence[Sequence[int]], *, steps: int, device: torch.device, dtype: torch.dtype
) -> list[Recorded]:
    """Prefill each prompt, decode ``steps`` tokens greedily (past an end of text too), and keep what
    attention saw.

    Raises:
        InvalidRequest: a prompt and its answer exceed the model's context.
    """
    import torch
    from transformers import AttentionInterface, AutoModelForCausalLM
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    seen: dict[int, torch.Tensor] = {}

    def forward(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
    ) -> Any:
        seen[module.layer_idx] = query[0, :, -1].clone()
        return sdpa_attention_forward(module, query, key, value, mask, **options)

    AttentionInterface.register(ATTENTION, forward)
    network = (
        AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation=ATTENTION)
        .to(device)
        .eval()
    )
    limit = network.config.max_position_embeddings
    records = []
    for ids in prompts:
        if len(ids) + steps > limit:
            raise InvalidRequest(
                f"A prompt of {len(ids)} tokens and {steps} more exceed the context of {model}, {limit} "
                "tokens."
            )
        tokens = torch.tensor([list(ids)], device=device)
        cache: Any = None
        queries = []
        with torch.no_grad():
            for step in range(steps + 1):
                out = network(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
                if step:  # the prefill's own last query is not a decode step's
                    queries.append(torch.stack([seen[layer] for layer in sorted(seen)]))
                cache, tokens = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)
        k, v = (
            torch.stack([getattr(layer, name)[0].transpose(0, 1) for layer in cache.layers])
            for name in ("keys", "values")
        )
        records.append(Recorded(torch.stack(queries), k, v, len(ids)))
    return records


def recorded_cases(records: Sequence[Recorded], *, page: int, steps: Sequence[int]) -> list[DecodeCase]:
    """A decode batch of all ``records`` per step, over one pool with pages of ``page`` tokens in random
    order; a layer per model layer.
    """
    import torch

    device = records[0].k.device
    longest = max(each.k.shape[1] for each in records)
    pages = -(-longest // page)
    order = torch.randperm(len(records) * pages, device=device)
    table = order.to(torch.int32).view(len(records), pages)
    shape = (len(records) * pages * page, *records[0].k.shape[2:])
    layers = []
    for i in range(records[0].k.shape[0]):
        k, v = (torch.zeros(shape, dtype=records[0].k.dtype, device=device) for _ in range(2))
        for b, each in enumerate(records):
            slots = slots_of(table[b], each.k.shape[1], page)
            k[slots], v[slots] = each.k[i], each.v[i]
        layer = Layer(records[0].q[0, i], k, v)
        add_summaries(layer, page)
        layers.append(layer)
    cases = []
    for step in steps:
        at = [
            replace(layer, q=torch.stack([each.q[step, i] for each in records]))
            for i, layer in enumerate(layers)
        ]
        lens = torch.tensor([each.tokens(step) for each in records], dtype=torch.int32, device=device)
        cases.append(DecodeCase(len(records), int(lens.max()), page, table, lens, at))
    return cases
