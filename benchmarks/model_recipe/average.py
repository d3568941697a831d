"""Average the weights before and after a training, by what they answer about held-out texts.

    python -m benchmarks.model_recipe.average PACKED OUT START END [END ...]

START is the folder that the training started from; a shallower model is grown. For each END and share the
weights ``(1 - share) * START + share * END`` answer the held-out questions (`heldout`). OUT gets the best by
the mean over the tasks, and ``average.json`` with all figures. No evaluation set is looked at. Averages keep
what START read and END was not shown again, and lose what only END has learned: hence the measuring."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.model_recipe import architecture as model
from benchmarks.model_recipe.architecture import Params, Shape
from benchmarks.model_recipe.forward import Forward
from benchmarks.model_recipe.heldout import TASKS, HeldOut, mean


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("packed", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("start", type=Path)
    parser.add_argument("ends", type=Path, nargs="+")
    parser.add_argument("--shares", default="1,0.9,0.8,0.7,0.6,0.5", help="of END, with commas")
    parser.add_argument("--tokens", type=int, default=131_072, help="tokens of each task")
    parser.add_argument("--tasks", default=",".join(TASKS))
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = Shape.read(options.ends[0])
    forward = Forward(shape, device)
    heldout = HeldOut(options.packed, options.tokens, device, options.tasks.split(","))
    start = model.started(options.start, shape, device)
    found: list[dict[str, Any]] = []
    best: tuple[float, Params] = (-1.0, {})
    for end in options.ends:
        weights = {name: value.to(device) for name, value in model.load(end).items()}
        for share in map(float, options.shares.split(",")):
            mixed = {name: torch.lerp(start[name], value, share) for name, value in weights.items()}
            scores = heldout.scores(forward, mixed)
            found.append({"end": end.name, "share": share, "mean": round(mean(scores), 2), **scores})
            print(json.dumps(found[-1]), flush=True)
            best = max(best, (mean(scores), mixed), key=lambda each: each[0])
    model.save(best[1], shape, options.out)
    (options.out / "average.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
