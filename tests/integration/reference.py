"""Reference for composed contexts, in transformers: prefill each document behind the prefix, rotate its keys,
concatenate the caches layer by layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ragserve_kernels.quantize_kv.naive import dequantize, quantize
from sglang_ext.analysis.texts import FIXED, Texts, prefix_of, unrelated_contexts
from tests.sentences import chosen, sentences_of


@dataclass
class Generated:
    ids: list[int]
    logprobs: list[float]


def _prefix_ids(path: Path, text: str, vocabulary: int) -> list[int]:
    from transformers import AutoTokenizer

    if not (path / "tokenizer_config.json").exists():
        return list(Texts.drawn(vocabulary).unrelated[0])
    return prefix_of(AutoTokenizer.from_pretrained(path), text)


class Reference:
    """A Hugging Face model in float32; ``page_bits``: of the documents' KV before it is moved; ``prefix``:
    the text that documents are prefilled behind, `FIXED` or another one."""

    def __init__(self, path: Path, page_bits: int = 16, prefix: str = FIXED) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        self.page_bits = page_bits
        self.layers = self.model.config.num_hidden_layers
        self.prefix = _prefix_ids(path, prefix, self.model.config.vocab_size)

    @torch.no_grad()
    def alone(self, ids: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Prefill a text from position 0. K and V of each layer, [1, kv_heads, n, head_dim]."""
        cache = self.model(torch.tensor([ids]), use_cache=True).past_key_values
        return [(self._stored(layer.keys), self._stored(layer.values)) for layer in cache.layers]

    @torch.no_grad()
    def document(self, ids: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Prefill a document behind the prefix, as `alone`; its keys stand as at positions from 0 on."""
        from transformers import DynamicCache

        n, cache = len(self.prefix), DynamicCache()
        if n:
            cache = self.model(torch.tensor([self.prefix]), use_cache=True).past_key_values
        positions = torch.arange(n, n + len(ids))[None]
        out = self.model(
            torch.tensor([ids]), past_key_values=cache, position_ids=positions, use_cache=True
        ).past_key_values
        return [
            (self._stored(self.moved(layer.keys[:, :, n:], -n)), self._stored(layer.values[:, :, n:]))
            for layer in out.layers
        ]

    def _stored(self, values: torch.Tensor) -> torch.Tensor:
        return dequantize(*quantize(values, 8)) if self.page_bits == 8 else values

    def moved(self, k: torch.Tensor, shift: int) -> torch.Tensor:
        """Rotate K by ``shift`` more positions."""
        cos, sin = self.model.model.rotary_emb(k, torch.tensor([[abs(shift)]]))
        a, b = k.chunk(2, -1)
        return k * cos[:, None] + torch.cat((-b, a), -1) * (sin if shift >= 0 else -sin)[:, None]

    @torch.no_grad()
    def composed(
        self,
        ids: list[int],
        spans: list[tuple[int, int]],
        n_new: int,
        *,
        kept: list[list[int]] | None = None,
        rotate: bool = True,
    ) -> Generated:
        """Continue greedily a prompt whose spans were prefilled apart; ``kept``: positions of each layer,
        default all."""
        return self._continue(
            ids[spans[-1][1] :], spans[-1][1], self._cache(ids, spans, kept, rotate=rotate), n_new
        )

    @torch.no_grad()
    def along(self, ids: list[int], spans: list[tuple[int, int]], answer: list[int]) -> torch.Tensor:
        """Log-probabilities before each token of a given answer, [tokens, vocabulary], decoded one by one
        behind a prompt whose spans were prefilled alone; without spans behind the plain prompt."""
        from transformers import DynamicCache

        position = spans[-1][1] if spans else 0
        cache: Any = self._cache(ids, spans) if spans else DynamicCache()
        step, found = ids[position:], []
        for token in answer:
            positions = torch.arange(position, position + len(step))[None]
            out = self.model(
                torch.tensor([step]), past_key_values=cache, position_ids=positions, use_cache=True
            )
            found.append(out.logits[0, -1].log_softmax(-1))
            step, position = [token], position + len(step)
        return torch.stack(found)

    @torch.no_grad()
    def attention(self, ids: list[int], spans: list[tuple[int, int]]) -> torch.Tensor:
        """Attention of the question's last token to the composed context, [layers, heads, context tokens]."""
        start = spans[-1][1]
        positions = torch.arange(start, len(ids))[None]
        self.model.set_attn_implementation("eager")
        try:
            out = self.model(
                torch.tensor([ids[start:]]),
                past_key_values=self._cache(ids, spans),
                position_ids=positions,
                output_attentions=True,
            )
        finally:
            self.model.set_attn_implementation("sdpa")
        return torch.stack([layer[0, :, -1, :start] for layer in out.attentions])

    @torch.no_grad()
    def sensitivity(self, document: list[int], text: list[int]) -> torch.Tensor:
        """Context sensitivity, [tokens]: the squared change of the values behind an unrelated text
        (docs/methods.md, section 6).
        """
        alone, moved = self.alone(document), torch.zeros(len(document))
        cache: Any = self.model(torch.tensor([text]), use_cache=True).past_key_values
        positions = torch.arange(len(text), len(text) + len(document))[None]
        after = self.model(
            torch.tensor([document]), past_key_values=cache, position_ids=positions, use_cache=True
        ).past_key_values
        for layer, (_, v) in enumerate(alone):
            moved += (after.layers[layer].values[:, :, len(text) :] - v).square().sum((0, 1, 3))
        return moved

    def _cache(
        self,
        ids: list[int],
        spans: list[tuple[int, int]],
        kept: list[list[int]] | None = None,
        *,
        rotate: bool = True,
    ) -> Any:
        from transformers import DynamicCache

        (first, *rest) = [ids[a:b] for a, b in spans]
        parts = [self.alone(first), *map(self.document, rest)]
        cache: Any = DynamicCache()
        for layer in range(self.layers):
            k = torch.cat(
                [self.moved(p[layer][0], a if rotate else 0) for (a, _), p in zip(spans, parts, strict=True)],
                2,
            )
            v = torch.cat([p[layer][1] for p in parts], 2)
            if kept is not None:
                k, v = k[:, :, kept[layer]], v[:, :, kept[layer]]
            cache.update(k, v, layer)
        return cache

    @torch.no_grad()
    def plain(self, ids: list[int], n_new: int) -> Generated:
        """Continue an ordinary prompt greedily."""
        from transformers import DynamicCache

        return self._continue(ids, 0, DynamicCache(), n_new)

    def _continue(self, ids: list[int], start: int, cache: Any, n_new: int) -> Generated:
        out, step, position = Generated([], []), ids, start
        for _ in range(n_new):
            positions = torch.arange(position, position + len(step))[None]
            logits = self.model(
                torch.tensor([step]), past_key_values=cache, position_ids=positions, use_cache=True
            ).logits[0, -1]
            logprobs = logits.log_softmax(-1)
            token = int(logits.argmax())
            out.ids.append(token)
            out.logprobs.append(float(logprobs[token]))
            step, position = [token], position + len(step)
        return out


def chosen_sentences(
    reference: Reference,
    tokenizer: Any,
    ids: list[int],
    spans: list[tuple[int, int]],
    share: float,
    **limits: Any,
) -> list[int]:
    """Positions that rule `sentences` recomputes in a context that is kept whole; ``limits``: of `chosen`."""
    late = reference.attention(ids, spans)[reference.layers // 2 :].amax(1).sum(0)
    unrelated = unrelated_contexts(tokenizer)[0]
    first, end = spans[0][1], spans[-1][1]
    sensitivity = torch.cat([reference.sensitivity(ids[a:b], unrelated) for a, b in spans[1:]]).tolist()
    return chosen(
        [(a, sentences_of([tokenizer.decode([token]) for token in ids[a:b]])) for a, b in spans[1:]],
        [set(range(first, end))],
        {first + t: value for t, value in enumerate(sensitivity)},
        dict(enumerate(late.tolist())),
        share,
        first=4,
        **limits,
    )
