"""Makes the sampling of requests with a seed repeatable. SGLang reads them only with deterministic inference,
which gives up its faster kernels for every request.

A token is drawn by exponential noise: the largest of probability / noise is a draw from the probabilities.
The noise depends on the seed and on the token's number in the answer alone, not on other requests, nor on
whether this one was retracted. So the same request gets the same answer as far as it gets the same
probabilities, which rounding may change with the batch that it is in."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_ext.state import current
from sglang_ext.versions import settings_of


@dataclass(slots=True)
class Seed:
    """A request's seed. ``position``: number of the answer's token that is sampled, or was last."""

    value: int
    position: int = -1


def on_request(req: Any) -> str | None:
    """Read a new request's seed; return why it is refused, None if it is not."""
    params = req.sampling_params
    if params.sampling_seed is None or params.top_k == 1:  # greedy
        return None
    args = settings_of(current.runtime.model_runner.server_args)
    if args.enable_deterministic_inference:
        return None  # SGLang does it
    if args.speculative_algorithm is not None:
        return "a seed does nothing with speculative decoding: leave it out, or ask with temperature 0"
    req.ragserve_seed = Seed(int(params.sampling_seed))
    return None


def seeded(reqs: Sequence[Any]) -> Iterator[tuple[int, Any, Seed]]:
    """Rows of a batch with a seed: (row, request, its seed)."""
    for row, req in enumerate(reqs):
        if (seed := getattr(req, "ragserve_seed", None)) is not None:
            yield row, req, seed


def next_position(req: Any, forward_batch: Any, last: int) -> int:
    """Return the number of the token that a request of a batch is about to sample; ``last``: of its latest.
    With the overlap scheduler the request itself does not know it yet. The chunks of a prompt, and a request
    that was retracted, come to the same token again."""
    decodes = any(req is other for other in forward_batch.ragserve_decoding)  # in a batch of prompts
    if forward_batch.forward_mode.is_extend() and not decodes:
        return len(req.output_ids)
    return last + 1


def before_sampling(forward_batch: Any) -> None:
    """Note which token each request of a batch samples."""
    for _, req, seed in seeded(forward_batch.ragserve_reqs):
        seed.position = next_position(req, forward_batch, seed.position)


def draw(probs: torch.Tensor, reqs: Sequence[Any], tokens: torch.Tensor) -> None:
    """Draw the tokens of the requests with a seed anew, in place. ``probs`` [rows, vocabulary], at each
    request's temperature; ``tokens`` [rows]."""
    for row, req, seed in seeded(reqs):
        noise = torch.empty(probs.shape[1], device=probs.device)
        noise.exponential_(generator=_generator(seed, probs.device)).clamp_min_(torch.finfo(noise.dtype).tiny)
        tokens[row] = (_kept(probs[row].float(), req.sampling_params) / noise).argmax()


def _generator(seed: Seed, device: torch.device) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed.value}:{seed.position}".encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little"))


def _kept(probs: torch.Tensor, params: Any) -> torch.Tensor:
    """Set to zero what top_k, top_p and min_p leave out, as SGLang's sampler does."""
    if params.top_k >= len(probs) and params.top_p >= 1 and params.min_p <= 0:
        return probs
    falling, ids = probs.sort(descending=True)
    keep = (falling.cumsum(0) - falling <= params.top_p) & (falling >= falling[0] * params.min_p)
    keep[params.top_k :] = False
    return torch.zeros_like(probs).scatter_(0, ids, falling * keep)
