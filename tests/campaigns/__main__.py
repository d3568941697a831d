"""Run a campaign to its end, record its figures, and fail if it found a violation.

    scripts/campaign NAME [--minutes M] [--operations N] [--seed S] [--work FOLDER] [--no-record]
                          [--side-by-side N] [--entry FILE] [--set JSON]

A campaign that was ended or killed goes on where it was, if it is called with the same seed and number of
operations and the same folder."""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

# The campaigns import what tests import: no network, and threads that do not spin.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
for _name in [name for name in os.environ if name.startswith("RAGSERVE_")]:
    del os.environ[_name]

_SET = """kill: `order`, what is killed; load: `clients`, `k`, `entries`, `burst_every`, fleet: `clients`,
    `documents`, `k`, `every_s`, and settings of the server, e.g. `context_length`, `replicas`"""
_MOUNTS = "CAMPAIGN_MAY_MOUNT"  # set in the process that has a mount namespace of its own
NAMES = (
    "operations",
    "dialogues",
    "kill",
    "damage",
    "tenants",
    "disk",
    "api",
    "load",
    "mixed",
    "routes",
    "fleet",
)
MOUNTING = ("disk",)  # run in a mount namespace of their own


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/campaign", description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--minutes", type=float, help="end after so many minutes, resumed runs included")
    parser.add_argument("--operations", type=int, help="end after so many operations")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--work", type=Path, default=Path("campaign-runs"), help="folder of states and data")
    parser.add_argument("--set", type=json.loads, default={}, metavar="JSON", help=_SET)
    parser.add_argument("--no-record", action="store_true", help="leave the results and the table alone")
    parser.add_argument("--entry", type=Path, metavar="FILE", help="write the entry to this file instead")
    parser.add_argument(
        "--side-by-side", type=int, default=1, metavar="N", help="N at once, with seeds S, S+1, ..."
    )
    options = parser.parse_args(arguments)
    if options.name in MOUNTING and not os.environ.get(_MOUNTS):  # before the imports: they take seconds
        os.environ[_MOUNTS] = "1"
        command = ["unshare", "-rm", sys.executable, "-m", "tests.campaigns", *arguments]
        os.execvp("unshare", command)
    logging.basicConfig(level=logging.ERROR)  # damage and full disks are warnings
    from ragserve.engine.compat import prepare, without_collection

    with without_collection():
        prepare()  # before transformers, which imports torchvision
        module = importlib.import_module(f"tests.campaigns.{options.name}")
        from tests.campaigns.record import record
    target = options.operations or module.TARGET
    row = _side_by_side(options, target, arguments) if options.side_by_side > 1 else _one(options, module)
    print(f"{options.name}: {row['operations']} operations in {row['minutes']} minutes: {row['kinds']}")
    print(f"{row['violations']} violations", *row["first violations"], sep="\n")
    if options.entry:
        options.entry.write_text(json.dumps(row), encoding="utf-8")
    elif not options.no_record:
        record(row)
    return bool(row["violations"])


def _one(options: argparse.Namespace, module: Any) -> dict[str, Any]:
    """Run a campaign in this process and return its entry."""
    from tests.campaigns.progress import Progress
    from tests.campaigns.record import row_of

    progress = Progress(
        (options.work / options.name).absolute(),
        options.name,
        seed=options.seed,
        target=options.operations or module.TARGET,
        minutes=options.minutes or getattr(module, "MINUTES", None),
    )
    if progress.resumed:
        print(f"going on after operation {progress.operations}", flush=True)
    try:
        module.run(progress, **options.set)
    finally:
        progress.save()
    progress.save(finished=True)
    return row_of(progress, _command(options))


def _side_by_side(options: argparse.Namespace, target: int | None, arguments: list[str]) -> dict[str, Any]:
    """Run the campaign several times at once, each with its part of the operations, and return their sum."""
    from tests.campaigns.record import joined

    entries, processes = [], []
    for seed in range(options.seed, options.seed + options.side_by_side):
        work = options.work / f"seed-{seed}"
        work.mkdir(parents=True, exist_ok=True)
        entries.append(work / "entry.json")
        own = ["--side-by-side", "1", "--seed", str(seed), "--work", str(work), "--entry", str(entries[-1])]
        own += ["--operations", str(-(-target // options.side_by_side))] if target else []
        command = [sys.executable, "-m", "tests.campaigns", *arguments, *own]  # the last of an option counts
        processes.append(subprocess.Popen(command))
    ends = [process.wait() for process in processes]
    if any(end not in (0, 1) for end in ends):
        sys.exit(f"A campaign ended with {max(ends)}: see its message above.")
    return joined([json.loads(entry.read_text(encoding="utf-8")) for entry in entries], _command(options))


def _command(options: argparse.Namespace) -> str:
    given = [
        f"--{name.replace('_', '-')} {str(value).removesuffix('.0')}"
        for name in ("minutes", "operations", "side_by_side")
        if (value := getattr(options, name)) not in (None, 1)
    ]
    given += [f"--seed {options.seed}"]
    given += [f"--set '{json.dumps(options.set)}'"] if options.set else []
    return " ".join(["scripts/campaign", options.name, *given])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
