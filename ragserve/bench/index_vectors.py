"""Vectors for the index benchmark: embeddings of real text, multiplied by perturbation along their own
covariance.

Embedding half a million sentences would take hours on two cores. Random vectors are no substitute: they have
no neighbours, which makes every approximate index look worse than text does. So a few thousand real sentences
are embedded; each further vector is one of them, x, moved by 0.6 L z and normalised again, where L L^T is the
covariance of the real embeddings and z is standard normal. That keeps the directions in which text varies,
and gives each sentence neighbours at a cosine of about 0.8. Queries are real sentences held out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ragserve.errors import InvalidRequest
from ragserve.json_lines import json_lines

_CORPUS = Path(__file__).resolve().parents[2] / "examples" / "corpus" / "files"
SPREAD = 0.6
_SLAB = 50_000


def sentences(texts: Path | None, limit: int) -> list[str]:
    """Collect distinct sentences and lines of 25 to 400 characters, from the example corpus or a .jsonl[.xz]
    of {text}, in a fixed order."""
    found: dict[str, None] = {}
    for text in (row["text"] for _, row in json_lines(texts)) if texts else _corpus():
        for piece in re.split(r"(?<=[.!?;])\s+|\n+", text):
            line = re.sub(r"\s+", " ", piece).strip()
            if 25 <= len(line) <= 400:
                found[line] = None
        if len(found) >= limit:
            break
    if len(found) < 200:
        raise InvalidRequest(f"Only {len(found)} sentences in {texts or _CORPUS}; the benchmark needs 200.")
    return list(found)[:limit]


def _corpus() -> Iterator[str]:
    for path in sorted(_CORPUS.iterdir()):
        if path.suffix in {".md", ".txt"}:
            yield path.read_text(encoding="utf-8")
        elif path.suffix == ".html":
            yield re.sub(
                r"<(script|style)(?:(?!</?\1).)*+</\1>|<[^<>]+>",
                "\n",
                path.read_text(encoding="utf-8"),
                flags=re.DOTALL,
            )


def multiply(real: Any, n: int, *, seed: int = 0) -> tuple[Any, Any]:
    """Make ``n`` unit vectors [n, dim] float32 around ``real`` [m, dim]; also returns the index in ``real``
    of each [n]."""
    import numpy as np

    rng = np.random.default_rng(seed)
    spread = _spread(real)
    out = np.empty((n, real.shape[1]), dtype=np.float32)
    origin = rng.integers(len(real), size=n)
    for start in range(0, n, _SLAB):
        part = slice(start, min(n, start + _SLAB))
        moved = real[origin[part]] + SPREAD * (
            rng.standard_normal(out[part].shape, dtype=np.float32) @ spread
        )
        out[part] = moved / np.linalg.norm(moved, axis=1, keepdims=True)
    return out, origin


def multiply_on(device: str, real: Any, n: int, *, seed: int = 0) -> Any:
    """Make ``n`` vectors [n, dim] float32 as :func:`multiply` does, but draw them on a torch device: ten
    million take seconds on a GPU. Other draws than those of :func:`multiply`."""
    import numpy as np
    import torch

    chosen = torch.Generator(device=device).manual_seed(seed)
    around, spread = (
        torch.from_numpy(np.ascontiguousarray(part)).to(device) for part in (real, _spread(real))
    )
    out = np.empty((n, real.shape[1]), dtype=np.float32)
    for start in range(0, n, _SLAB):
        rows = min(_SLAB, n - start)
        origin = torch.randint(len(real), (rows,), generator=chosen, device=device)
        noise = torch.randn(rows, real.shape[1], generator=chosen, device=device)
        moved = torch.nn.functional.normalize(around[origin] + SPREAD * (noise @ spread), dim=1)
        out[start : start + rows] = moved.cpu().numpy()
    return out


def _spread(real: Any) -> Any:
    """S [dim, dim] such that z @ S, with z standard normal, has the covariance of ``real``."""
    import numpy as np

    centred = real - real.mean(axis=0)
    values, directions = np.linalg.eigh(centred.T @ centred / len(real))
    return (directions * np.sqrt(np.maximum(values, 0))).astype(np.float32).T
