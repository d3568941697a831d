"""Copy the work folder of a `ragserve adapt` that goes on on another machine.

    python -m benchmarks.packed_adaptation WORK OUT

Tensors are copied in 16 bits and without the optimiser's state; `ragserve adapt --work` goes on from OUT, and
warms up anew."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path


def pack(work: Path, out: Path) -> None:
    """Copy a work folder, its tensors in bfloat16."""
    import torch
    from safetensors.torch import load_file, save_file

    for path in work.rglob("*"):
        place = out / path.relative_to(work)
        if path.suffix == ".safetensors" and path.parent.name != "merged":
            place.parent.mkdir(parents=True, exist_ok=True)
            save_file({name: each.to(torch.bfloat16) for name, each in load_file(path).items()}, place)
        elif path.suffix in (".json", ".jsonl") and path.parent == work:
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args(arguments)
    pack(args.work, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
