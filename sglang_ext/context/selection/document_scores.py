"""Score documents for a question by the stored keys of their retrieval heads.

    s(d) = sum over tokens t of the question and retrieval query heads of:
           max over tokens n of d of <q_t, k_n> / sqrt(head_dim)

A retrieval head's query looks for the place where its token stands in a text, so the sum tells how much of
the question a document has. It is the late interaction of ColBERT (Khattab and Zaharia, 2020) with the
queries and keys of an attention head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from sglang_ext.analysis.document_analysis import Analysis
from sglang_ext.context.selection.queries import CHUNK_BYTES
from sglang_ext.context.selection.sentences import SINKS
from sglang_ext.tensors.rope import Rotation

_TOGETHER = 65_536  # tokens of documents that are scored together, each counted as long as the longest


def document_scores(
    queries: torch.Tensor, start: int, analyses: Sequence[Analysis], rotation: Rotation
) -> torch.Tensor:
    """f32 [D]: the scores by this rank's retrieval heads, to be summed over ranks.

    ``queries`` f32 [layers, T, heads, head_dim]: those of the question's tokens, rotated for positions from
    ``start`` on. Each document is scored as if it stood right before the question. Its first `SINKS` tokens
    do not count, unless it has no others."""
    total = torch.zeros(len(analyses), device=queries.device)
    for places in _groups([each.n_tokens for each in analyses]):
        total[places] = _scores(queries, start, [analyses[place] for place in places], rotation)
    return total


def _groups(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Places of documents of about one length: beside a long one, each short one would cost as much as it."""
    group: list[int] = []
    for place in sorted(range(len(lengths)), key=lengths.__getitem__):
        if group and (len(group) + 1) * lengths[place] > _TOGETHER:
            yield group
            group = []
        group.append(place)
    if group:
        yield group


def _scores(
    queries: torch.Tensor, start: int, analyses: Sequence[Analysis], rotation: Rotation
) -> torch.Tensor:
    """`document_scores` of documents that are padded to the longest of them."""
    tokens, dim, device = queries.shape[1], queries.shape[-1], queries.device
    keys, scale = (
        pad_sequence([getattr(each, name).to(device) for each in analyses], batch_first=True)
        for name in ("token_k", "token_k_scale")
    )  # [D, M, found, head_dim] and [D, M, found]
    documents, longest = keys.shape[:2]
    lengths = torch.tensor([each.n_tokens for each in analyses], device=device)[:, None]
    place = torch.arange(longest, device=device)
    uncounted = (place < SINKS) & (lengths > SINKS) | (place >= lengths)  # [D, M]
    group = queries.shape[2] // analyses[0].mean_k.shape[2]
    total = torch.zeros(documents, device=device)
    step = max(1, CHUNK_BYTES // (4 * group * documents * longest))
    for number, (layer, head) in enumerate(analyses[0].heads.tolist()):
        own = keys[:, :, number].float() * scale[:, :, number, None].float()  # [D, M, head_dim]
        for at in range(0, tokens, step):
            rows = queries[layer, at : at + step, head * group : (head + 1) * group]  # [t, group, head_dim]
            spread = rows[None].expand(documents, -1, -1, -1).flatten(1, 2)  # [D, t * group, head_dim]
            moved = rotation.rotate(spread, lengths[:, 0] - start)
            products = (moved @ own.transpose(1, 2)).masked_fill_(uncounted[:, None], -torch.inf)
            total += products.amax(-1).sum(-1) / dim**0.5
    return total
