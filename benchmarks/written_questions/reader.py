"""Several tasks over the same passages, in batches, greedily, in plain transformers: a passage's KV is
computed once, and every task's text goes behind it.

Any causal model with a chat template, in bfloat16 on a GPU and in float32 on a CPU. Rows are padded on the
left, and between a passage and a task's text, where the mask hides it; positions count what is not hidden."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ragserve.answering.chat_template import ChatLayout
from ragserve.answering.prompt import load_tokenizer

_LOOK = 4  # steps between two looks whether all rows have ended


@dataclass
class Read:
    """What was read of B rows of at most L tokens: the model's ``cache``, and ``mask`` [B, L], 1: token."""

    cache: Any
    mask: torch.Tensor


class Reader:
    """A loaded model."""

    def __init__(self, folder: Path, device: str = "cpu", system: str | None = None) -> None:
        from transformers import AutoModelForCausalLM

        self.tokenizer = load_tokenizer(str(folder))
        self.layout = ChatLayout(self.tokenizer)
        self._system = system
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self._model: Any = model.to(device).eval()
        self._device = device
        ends = self._model.generation_config.eos_token_id or self.tokenizer.eos_token_id
        found = {*(ends if isinstance(ends, list) else [ends]), self.tokenizer.eos_token_id}
        self._ends = torch.tensor(sorted(found), device=device)

    def head(self, documents: Sequence[tuple[str, str]]) -> list[int]:
        """Token ids of the system text and the documents, each a title and a text."""
        ids = self.layout.encode(self.layout.head(self._system, has_documents=bool(documents)))
        for title, text in documents:
            ids = [*ids, *self.layout.encode(self.layout.document(title, text))]
        return ids

    def task(self, text: str, begin: str = "", *, has_documents: bool = True) -> list[int]:
        """Token ids of a task behind the documents, and of the beginning of the answer."""
        pieces = self.layout.question(text, (), has_documents=has_documents)
        return self.layout.encode([*pieces, (begin, False)] if begin else pieces)

    @torch.inference_mode()
    def read(self, rows: Sequence[Sequence[int]]) -> Read:
        """Compute the KV of token ids, a row a passage."""
        from transformers import DynamicCache

        ids, mask = self._padded(rows)
        cache = DynamicCache(config=self._model.config)
        self._forward(ids, mask, mask, cache)
        return Read(cache, mask)

    @torch.inference_mode()
    def write(self, read: Read, rows: Sequence[Sequence[int]], new_tokens: int) -> list[str]:
        """Return what the model writes behind each row's task, at most so many tokens. ``read`` is as before
        afterwards."""
        before = read.mask.shape[1]
        ids, own = self._padded(rows)
        mask = torch.cat([read.mask, own], 1)
        written: list[torch.Tensor] = []
        ended = torch.zeros(len(rows), dtype=torch.bool, device=self._device)
        one = mask.new_ones(len(rows), 1)
        try:
            logits = self._forward(ids, own, mask, read.cache)
            while True:
                token = logits.argmax(-1).masked_fill(ended, self._ends[0])
                written.append(token)
                ended |= torch.isin(token, self._ends)
                n = len(written)
                if n == new_tokens or (n % _LOOK == 0 and bool(ended.all())):
                    break
                mask = torch.cat([mask, one], 1)
                logits = self._forward(token[:, None], one, mask, read.cache)
        finally:
            read.cache.crop(before)
        stops = set(self._ends.tolist())
        texts = []
        for row in torch.stack(written, 1).tolist():
            end = next((place for place, token in enumerate(row) if token in stops), len(row))
            texts.append(self.tokenizer.decode(row[:end], skip_special_tokens=True))
        return texts

    def _forward(self, ids: torch.Tensor, own: torch.Tensor, mask: torch.Tensor, cache: Any) -> torch.Tensor:
        """The last token's logits of each row [B, vocabulary]. ``own``: the mask of ``ids``."""
        places = (mask.cumsum(1) - 1).clamp(min=0)[:, -own.shape[1] :]
        found = self._model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=places,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: torch.Tensor = found.logits[:, -1]
        return logits

    def _padded(self, rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids [B, L], padded on the left, and their mask."""
        longest = max(map(len, rows))
        ids = [[0] * (longest - len(row)) + list(row) for row in rows]
        mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
        return torch.tensor(ids, device=self._device), torch.tensor(mask, device=self._device)
