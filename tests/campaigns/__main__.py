"""Run a campaign to its end, record its figures, and fail if it found a violation.

    scripts/campaign NAME [--minutes M] [--operations N] [--seed S] [--work FOLDER] [--no-record]

A campaign that was ended or killed goes on where it was, if it is called with the same seed and number of
operations and the same folder."""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import sys
from pathlib import Path

# The campaigns import what tests import: no network, and threads that do not spin.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
for _name in [name for name in os.environ if name.startswith("RAGSERVE_")]:
    del os.environ[_name]

_SET = """load: `clients`, and settings of the server, e.g. {"clients": 64, "context_length": 32768}"""
_MOUNTS = "CAMPAIGN_MAY_MOUNT"  # set in the process that has a mount namespace of its own
NAMES = ("operations", "kill", "damage", "tenants", "disk", "api", "load")
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
    options = parser.parse_args(arguments)
    if options.name in MOUNTING and not os.environ.get(_MOUNTS):  # before the imports: they take seconds
        os.environ[_MOUNTS] = "1"
        command = ["unshare", "-rm", sys.executable, "-m", "tests.campaigns", *arguments]
        os.execvp("unshare", command)
    logging.basicConfig(level=logging.ERROR)  # damage and full disks are warnings
    from ragserve.engine.compat import prepare, without_collection

    with without_collection():
        prepare()  # before transformers, which imports torchvision
        from tests.campaigns.progress import Progress
        from tests.campaigns.record import record, row_of

        module = importlib.import_module(f"tests.campaigns.{options.name}")
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
    given = [
        f"{name} {str(value).removesuffix('.0')}"
        for name in ("minutes", "operations")
        if (value := getattr(options, name))
    ]
    said = [f"--{each}" for each in given] + [f"--seed {options.seed}"]
    said += [f"--set '{json.dumps(options.set)}'"] if options.set else []
    row = row_of(progress, " ".join(["scripts/campaign", options.name, *said]))
    print(f"{progress.name}: {progress.operations} operations in {row['minutes']} minutes: {row['kinds']}")
    print(f"{progress.n_violations} violations", *progress.violations, sep="\n")
    if not options.no_record:
        record(row)
    return bool(progress.n_violations)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
