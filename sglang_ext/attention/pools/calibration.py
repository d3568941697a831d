"""Learns which KV heads need all of the context: gates by DuoAttention's objective on synthetic passkeys.

A head's attention becomes ``gate * full + (1 - gate) * streaming``, with gates from 0 to 1 per layer and KV
head and the model frozen. Adam minimises the mean squared difference of the last hidden states from the
unchanged model's at the tokens that repeat the passkeys, plus ``penalty`` times the mean gate: heads that do
not carry passkeys over the distance end near 0 and may stream."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from sglang_ext.attention.pools.streaming_heads import save_pattern, streaming_heads

log = logging.getLogger(__name__)
_NAME = "ragserve_gated_heads"
_COLOURS = ["red", "blue", "green", "white", "black", "brown", "grey", "golden", "silver", "purple"]
_THINGS = ["house", "river", "garden", "bridge", "tower", "engine", "letter", "window", "market", "island"]
_FILLER = (
    "The grass is green and the sky is blue. ",
    "The sun is yellow and rises in the east. ",
    "Here we go, there and back again. ",
    "A ship came into the harbour late in the evening. ",
    "People talked about the weather and the price of bread. ",
    "The road leads over the hills to the next village. ",
    "In winter the lake is covered with ice. ",
)
SHARES = (0.25, 0.5, 0.75)
_HELD_OUT_SEED = 1_000_003  # of the texts for evaluation
_BAD = 5  # steps in a row without a finite gradient that end the learning
# Not cuDNN, PyTorch's first choice on H100 and H200: given a mask, its gradients of queries are NaN where
# tokens % 128 is 64 and a row's logsumexp is below -88.7, as some of Qwen2's are (pytorch/pytorch#196678).
_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True)
class Passkeys:
    """A long text with passkeys, then their repetition, which begins at token ``answers``."""

    ids: list[int]
    answers: int


@dataclass(frozen=True)
class Quality:
    """Measure what a share of streaming heads costs on held-out texts, at the tokens that repeat passkeys.

    ``error``: of the hidden states, relative to the unchanged model's. ``agreement``: share of tokens with
    its next token. ``passkeys``: share of tokens that come out right."""

    share: float
    error: float
    agreement: float
    passkeys: float


def make_passkeys(
    encode: Callable[[str], list[int]], tokens: int, draw: random.Random, count: int = 5
) -> Passkeys:
    """Make a text of about ``tokens`` tokens with ``count`` passkeys."""
    names = draw.sample([f"{colour} {thing}" for colour in _COLOURS for thing in _THINGS], count)
    facts = [f"The code of the {name} is {draw.randrange(10_000, 100_000)}. " for name in names]
    answer = encode("".join(draw.sample(facts, count)))
    pieces: list[list[int]] = []
    room = tokens - len(answer) - sum(len(encode(fact)) for fact in facts)
    while room > 0:
        pieces.append(encode(draw.choice(_FILLER)))
        room -= len(pieces[-1])
    for fact in facts:
        pieces.insert(draw.randrange(len(pieces) + 1), encode(fact))
    text = [token for piece in pieces for token in piece]
    return Passkeys(text + answer, len(text))


class GatedModel:
    """A frozen Hugging Face model that mixes full and streaming attention by gates [layers, kv_heads]."""

    def __init__(self, path: str, *, device: str = "cpu", sink: int = 64, local: int = 256) -> None:
        from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

        self.sink, self.local, self.device = sink, local, torch.device(device)
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        AttentionInterface.register(_NAME, self._attend)
        self.model = (
            AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
            .to(self.device)
            .eval()
            .requires_grad_(False)
        )
        self.model.set_attn_implementation(_NAME)
        config = self.model.config.get_text_config()
        self.shape = (
            config.num_hidden_layers,
            getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        )
        self._gates: torch.Tensor | None = None

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    @contextmanager
    def gated(self, gates: torch.Tensor) -> Iterator[None]:
        """Mix by these gates inside the block; without them attention is full."""
        self._gates = gates
        try:
            yield
        finally:
            self._gates = None

    def hidden(self, text: Passkeys) -> torch.Tensor:
        """Return the last hidden states [tokens, hidden] that predict the repetition."""
        ids = torch.tensor([text.ids], device=self.device)
        states: torch.Tensor = self.model.base_model(ids, use_cache=False).last_hidden_state[0]
        return states[text.answers - 1 : -1]

    def next_tokens(self, states: torch.Tensor) -> torch.Tensor:
        """Return the most likely next tokens, [tokens]."""
        found: torch.Tensor = self.model.get_output_embeddings()(states).argmax(-1)
        return found

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
        """q [1, heads, tokens, head_dim]; k, v [1, kv_heads, tokens, head_dim]."""
        with sdpa_kernel(_BACKENDS):
            full = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
            if self._gates is not None:
                place = torch.arange(q.shape[2], device=q.device)
                distance = place[:, None] - place[None]
                seen = (distance >= 0) & ((place[None] < self.sink) | (distance < self.local))
                groups = q.shape[1] // k.shape[1]
                # repeated: not every PyTorch's memory-efficient kernel takes groups
                k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
                near = scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scaling)
                gate = self._gates[module.layer_idx].to(q.dtype).repeat_interleave(groups)
                gate = gate[None, :, None, None]
                full = gate * full + (1 - gate) * near
        return full.transpose(1, 2), None


def learn(
    model: GatedModel,
    *,
    steps: int,
    tokens: int,
    penalty: float = 0.05,
    rate: float = 0.02,
    seed: int = 0,
    progress: Callable[[int, float, float], None] | None = None,
) -> torch.Tensor:
    """Learn gates, float32 [layers, kv_heads] on the CPU.

    ``progress`` gets the step, the relative error of the states, and the mean gate. A step without a finite
    error and gradient leaves the gates as they are. Raises FloatingPointError for five of them in a row, and
    where no step was taken."""
    draw = random.Random(seed)
    gates = torch.ones(model.shape, device=model.device, requires_grad=True)
    optimiser = torch.optim.Adam([gates], lr=rate)
    bad = 0
    for step in range(steps):
        text = make_passkeys(model.encode, draw.randrange(tokens // 2, tokens + 1), draw)
        with torch.no_grad():
            want = model.hidden(text).float()
        with model.gated(gates):
            got = model.hidden(text).float()
        error = (got - want).square().mean() / want.square().mean()
        optimiser.zero_grad()
        (error + penalty * gates.mean()).backward()
        optimiser.param_groups[0]["lr"] = rate * min(1.0, 5 * (step + 1) / steps, 5 * (steps - step) / steps)
        if gates.grad is not None and bool(error.isfinite() & gates.grad.isfinite().all()):
            bad = 0
            optimiser.step()
            with torch.no_grad():
                gates.clamp_(0, 1)
        else:
            bad += 1
            log.warning("step %d of %d is not taken: no finite error and gradient", step + 1, steps)
            if bad == min(_BAD, steps):
                raise FloatingPointError(f"{bad} steps in a row had no finite error and gradient")
        if progress is not None:
            progress(step, float(error.detach()), float(gates.detach().mean()))
    return gates.detach().cpu()


@torch.no_grad()
def evaluate(model: GatedModel, streaming: torch.Tensor, texts: Sequence[Passkeys]) -> Quality:
    """Evaluate the model with the heads named in ``streaming``, bool [layers, kv_heads], streaming."""
    error, agreed, right, total = 0.0, 0, 0, 0
    for text in texts:
        want = model.hidden(text)
        with model.gated((~streaming).float().to(model.device)):
            got = model.hidden(text)
        error += float((got - want).float().square().mean() / want.float().square().mean())
        tokens = model.next_tokens(got)
        agreed += int((tokens == model.next_tokens(want)).sum())
        right += int((tokens.cpu() == torch.tensor(text.ids[text.answers :])).sum())
        total += len(tokens)
    return Quality(float(streaming.float().mean()), error / len(texts), agreed / total, right / total)


def calibrate(
    out: Path,
    *,
    model: str,
    share: float,
    steps: int,
    tokens: int,
    penalty: float,
    held_out: int,
    device: str,
    progress: Callable[[int, float, float], None] | None = None,
) -> list[dict[str, Any]]:
    """Learn gates and write the pattern of ``share`` streaming heads to ``out``; return what shares cost.

    A row per share (``share`` and SHARES among them) and way of choosing the heads: by their gates, or by
    chance. ``device``: a torch device, or "auto": cuda if there is one. Raises FloatingPointError, and writes
    nothing, where the model's values or their gradients are not finite."""
    where = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    gated = GatedModel(model, device=where)
    gates = learn(gated, steps=steps, tokens=tokens, penalty=penalty, progress=progress)
    draw = random.Random(_HELD_OUT_SEED)
    texts = [make_passkeys(gated.encode, tokens, draw) for _ in range(held_out)]
    noise = torch.rand(gates.shape, generator=torch.Generator().manual_seed(0))
    found = []
    for part in sorted({0.0, *SHARES, share, 1.0}):
        for name, scores in (("gates", gates), ("chance", noise)):
            if name == "gates" or 0 < part < 1:
                quality = evaluate(gated, streaming_heads(scores, part), texts)
                if not math.isfinite(quality.error):
                    raise FloatingPointError(f"with {part:.0%} streaming heads the states are not finite")
                figures = {key: round(value, 4) for key, value in vars(quality).items() if key != "share"}
                found.append({"chosen by": name, "share": part, **figures})
    details = {
        "made by": f"ragserve calibrate --part heads --out {out.name} --share {share} --steps {steps} "
        f"--tokens {tokens} --penalty {penalty} --held-out {held_out} --device {where}",
        "passkeys dense": next(row["passkeys"] for row in found if row["share"] == 0),
        "mean gate": round(float(gates.mean()), 4),
        "quality": found,
    }
    name = Path(model).name if Path(model).is_dir() else model
    save_pattern(out, gates, share=share, model=name, **details)
    return found
