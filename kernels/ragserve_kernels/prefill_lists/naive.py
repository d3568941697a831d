"""The greedy choices as loops, step by step; the truth of ``greedy_lines`` and ``greedy_blocks``."""

from __future__ import annotations

import math

import torch

from ragserve_kernels.prefill_lists.lines import Lines, LineShape


def greedy_lines_naive(
    mass: torch.Tensor,
    shape: LineShape,
    alpha: float,
    given: Lines | None = None,
    share: float | None = None,
) -> Lines:
    """See :func:`ragserve_kernels.prefill_lists.greedy_lines`."""
    segments, heads, _, width = mass.shape
    chosen = torch.zeros(2, segments, heads, width, dtype=torch.bool)
    for segment in range(segments):
        own = shape.own[segment].tolist()
        lengths = (shape.vertical[segment].tolist(), shape.slash[segment].tolist())
        for head in range(heads):
            cells = {
                (i, j): float(mass[segment, head, i, j]) for i, at in enumerate(own) for j in range(at + 1)
            }
            weights = [[0.0] * width, [0.0] * width]
            for (i, j), weight in cells.items():
                weights[0][j] += weight
                weights[1][own[i] - j] += weight
            lines = [(kind, place) for kind in (0, 1) for place in range(width)]
            lines.sort(key=lambda line: -weights[line[0]][line[1]] / max(1, lengths[line[0]][line[1]]))
            if given is not None:
                lines.sort(key=lambda line: not given[line[0]][head, line[1]])
            lines = [(0, 0), (1, 0), *[line for line in lines if line not in ((0, 0), (1, 0))]]
            total, held, length = sum(cells.values()), 0.0, 0.0
            for taken, (kind, place) in enumerate(lines):
                enough = alpha < 1 and held >= alpha * total * (1 - 1e-6)
                if share is not None:
                    enough = length >= share * sum(lengths[0])
                if taken >= 2 and enough:
                    break
                length += lengths[kind][place]
                chosen[kind, segment, head, place] = True
                crossed = [(i, j) for i, j in cells if (j if kind == 0 else own[i] - j) == place]
                held += sum(cells.pop(cell) for cell in crossed)
    return Lines(*chosen.to(mass.device))


def greedy_blocks_naive(
    score: torch.Tensor,
    reach: torch.Tensor,
    forced: torch.Tensor,
    alpha: float,
    share: float | None = None,
) -> torch.Tensor:
    """See :func:`ragserve_kernels.prefill_lists.greedy_blocks`."""
    chosen = forced[:, None].repeat(1, score.shape[1], 1)
    for block in range(score.shape[0]):
        for head in range(score.shape[1]):
            own = score[block, head].tolist()
            weight = [math.exp(each) for each in own]
            total = sum(weight[: int(reach[block])])
            while True:
                held = sum(weight[j] for j in chosen[block, head].nonzero()[:, 0].tolist())
                left = [j for j in range(int(reach[block])) if not chosen[block, head, j]]
                enough = alpha < 1 and held >= alpha * total * (1 - 1e-6)
                if share is not None:
                    enough = int(chosen[block, head].sum()) >= math.ceil(share * int(reach[block]))
                if enough or not left:
                    break
                chosen[block, head, max(left, key=lambda j: own[j])] = True
    return chosen
