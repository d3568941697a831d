"""Sends the whole distribution of a request's first token, by which `ragserve eval` compares strategies.

SGLang's own `top_logprobs_num` sends Python lists for every generated token; over a whole vocabulary that
costs more than the answer.
"""

from __future__ import annotations

import base64
from typing import Any

import torch

from sglang_ext.protocol import DISTRIBUTION_FIELD


def wanted(req: Any) -> bool:
    """True if a request asks for it and has no token yet; a retracted request keeps what it had."""
    params = req.sampling_params.custom_params
    return isinstance(params, dict) and bool(params.get(DISTRIBUTION_FIELD)) and not req.output_ids


def capture(batch: Any, logits: torch.Tensor | None) -> None:
    """Before sampling, put the logits [rows, vocabulary] of an extend batch into the ``meta_info`` of the
    rows that want them.

    The value is base64 of little-endian float32 log-probabilities [vocabulary]. The last chunk of a prompt
    overwrites those before. For measurements: it waits for the forward pass, which costs overlap.
    """
    if logits is None:
        return
    decoding = batch.decoding_reqs or ()  # rows of a mixed batch that only decode
    for row, req in enumerate(batch.reqs):
        if wanted(req) and not any(req is other for other in decoding):
            logprobs = logits[row].float().log_softmax(-1).cpu().numpy().astype("<f4")
            text = base64.b64encode(logprobs.tobytes()).decode()
            req.customized_info = {**(req.customized_info or {}), DISTRIBUTION_FIELD: [text]}
