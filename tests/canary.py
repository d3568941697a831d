"""Say what another SGLang changes for ragserve.

    scripts/canary VERSION [--smoke] [--results FILE ...] [--out FILE]

Downloads SGLang's wheel without its dependencies and compares its sources with the installed version: the
functions that ragserve hooks (`sglang_ext.process.hooks`), overrides or calls (`sglang_ext.versions`, the
version's own folder or the newest), every name that ragserve imports from SGLang, how much of each of these
modules has changed, and the requirements. The output lists what to port and what to read.

``--smoke`` also runs engine tests on that version, in a folder of its own in front of this environment, which
is `.venv/sglang-VERSION` if `scripts/install` has made it. Needs several minutes. ``--results`` adds what
other tests have done there: files of ``pytest --junitxml``, the newest last.

Exits with 1 if something that ragserve needs is gone or has other parameters, or if a test fails."""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from sglang_ext.cpu.torchvision import prepare

prepare()

from sglang_ext.process import hooks  # noqa: E402  (SGLang imports torchvision)
from sglang_ext.sglang_internals import weight_updates  # noqa: E402

REPO = Path(__file__).resolve().parents[1]
ROOMS = ("ragserve", "sglang_ext", "index/ragserve_index", "kernels/ragserve_kernels")
VERSIONS = REPO / "sglang_ext" / "versions"
FOLLOWED = ("transformers", "tokenizers", "xgrammar")  # of its pins; the others are ours, or for CUDA
SMOKE = (
    "tests/unit/process/test_hooks.py",
    "tests/integration/test_engine.py",
    "tests/integration/test_context.py",
    "tests/integration/test_document_kv.py",
)
_SMOKE_S = 3000
_IMPORTS = re.compile(r"\b(?:from|import)\s+sglang\b")
_OUTCOMES = ("passed", "failed", "skipped")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("version")
    parser.add_argument("--out", type=Path, help="write the list there, too")
    parser.add_argument("--smoke", action="store_true", help="also run engine tests on it")
    parser.add_argument("--results", type=Path, nargs="+", default=[], help="of other tests, run on it")
    options = parser.parse_args()
    here = Sources(Path(str(importlib.util.find_spec("sglang").submodule_search_locations[0])).parent)  # type: ignore[union-attr, index]
    with tempfile.TemporaryDirectory() as folder:
        there = Sources(downloaded(options.version, Path(folder)))
        module = module_for(options.version)
        gone = [*missing_functions(there, functions(module)), *missing_names(there, module)]
        results = list(options.results)
        if options.smoke:
            results.append(smoke(options.version, there, Path(folder)))
        tests = outcomes(results, options.version)
        failed = [f"`{name}`: {why}" for name, (_, _, why) in tests.items() if why]
        lines = [
            f"# SGLang {options.version} beside {importlib.metadata.version('sglang')}",
            "",
            "Made by `scripts/canary`.",
            "",
            f"{len(hooked(module))} functions are hooked, {len(hooks.HOOKS)} of the installed version. "
            f"What differs: `sglang_ext/versions/{module}`.",
            "",
            *section("Gone or moved", gone),
            *([*table(tests), *section("Failing tests", failed)] if tests else []),
            *hook_table(),
            *section("Changed modules that ragserve hooks or imports from", changed(here, there)),
            *section("Requirements", requirements(there)),
        ]
    text = "\n".join(lines).rstrip() + "\n"
    print(text)
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    return 1 if gone or failed else 0


def module_for(version: str) -> str:
    """The folder of `sglang_ext.versions` for a version: its own, or the newest."""
    modules = sorted(path.name for path in VERSIONS.glob("sglang_*"))
    own = f"sglang_{version.replace('.', '_')}"
    return own if own in modules else modules[-1]


def relied_on(module: str) -> dict[str, tuple[str, ...]]:
    """Functions that a folder of `sglang_ext.versions` overrides or calls, and their parameters."""
    found: dict[str, tuple[str, ...]] = importlib.import_module(f"sglang_ext.versions.{module}").RELIED_ON
    return found


def functions(module: str) -> dict[str, tuple[str, ...]]:
    """All functions that are hooked, overridden or called with a folder of `sglang_ext.versions`."""
    return hooked(module) | relied_on(module)


def hooked(module: str) -> dict[str, tuple[str, ...]]:
    """The hooked functions, and their parameters."""
    version = importlib.import_module(f"sglang_ext.versions.{module}")
    own = {target: parameters for target, parameters, *_ in version.OWN_HOOKS}
    own |= {f"{weight_updates.UPDATER}.{name}": ("self", "recv_req") for name in version.WEIGHT_ENTRIES}
    return {hook.target: hook.parameters for hook in hooks.SHARED} | own


def smoke(version: str, there: Sources, folder: Path) -> Path:
    """Run the smoke tests on a version; return the file of their results.

    Exits with what pytest says if they do not run."""
    prepared = Path(sys.prefix) / f"sglang-{version}"
    if not prepared.is_dir():
        pins = [f"sglang=={version}", *followed(there)]
        prepared = folder / "packages"
        command = [sys.executable, "-m", "pip", "--quiet", "install", "--no-deps", "--target", str(prepared)]
        subprocess.run([*command, *pins], check=True)
    ours = [REPO, *(REPO / room for room in ("index", "kernels"))]
    path = os.pathsep.join(map(str, [prepared, *ours]))
    results = folder / "results.xml"
    command = [sys.executable, "-m", "pytest", "--quiet", "--tb=short", f"--junitxml={results}", *SMOKE]
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": path},
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=_SMOKE_S,
        check=False,
    )
    print(done.stdout, file=sys.stderr)
    if done.returncode > 1 or not results.is_file():  # neither passed nor failed
        sys.exit(f"the tests do not run: {(done.stdout + done.stderr).strip().splitlines()[-1]}")
    return results


Outcome = tuple[str, str, str]
"""A test's file, "passed", "failed" or "skipped", and why it failed."""


def outcomes(results: Iterable[Path], version: str) -> dict[str, Outcome]:
    """The outcome of each test, by its name, of files of ``pytest --junitxml``; later ones replace earlier.

    Exits if a file is of another version."""
    found: dict[str, Outcome] = {}
    for path in results:
        root = ET.parse(path).getroot()
        ran_on = {each.get("value") for each in root.iter("property") if each.get("name") == "sglang"}
        if ran_on != {version}:
            sys.exit(f"{path} has results of {' and '.join(map(str, ran_on)) or 'an unknown version'}")
        for case in root.iter("testcase"):
            file = (case.get("classname") or "").replace(".", "/") + ".py"
            bad = next((each for each in case if each.tag in ("failure", "error")), None)
            skipped = case.find("skipped") is not None
            outcome = "failed" if bad is not None else "skipped" if skipped else "passed"
            why = "" if bad is None else (bad.get("message") or bad.tag).splitlines()[0][:200]
            found[f"{file}::{case.get('name')}"] = (file, outcome, why)
    return found


def table(tests: dict[str, Outcome]) -> list[str]:
    """Tests that passed, failed and were skipped: those of engines by file, all others by folder."""
    counts = Counter((_row(file), outcome) for file, outcome, _ in tests.values())
    rows = []
    for row in sorted({row for row, _ in counts}):
        rows.append(f"| `{row}` | " + " | ".join(str(counts[row, each]) for each in _OUTCOMES) + " |")
    return ["## Tests on it", "", f"| tests | {' | '.join(_OUTCOMES)} |", "|---|---|---|---|", *rows, ""]


def _row(file: str) -> str:
    parts = Path(file).parts
    return file if parts[1:2] == ("integration",) or len(parts) < 4 else "/".join(parts[:3])


def hook_table() -> list[str]:
    """What would make each hook needless."""
    rows = [f"| `{hook.target.removeprefix('sglang.srt.')}` | {hook.until} |" for hook in hooks.SHARED]
    return ["## Hooks", "", "| function of `sglang.srt` | needless with |", "|---|---|", *rows, ""]


def followed(there: Sources) -> list[str]:
    """The version's pins of `FOLLOWED`."""
    pins = re.findall(r"^Requires-Dist: ([\w-]+==[\w.]+)$", _metadata(there), re.MULTILINE)
    return [pin for pin in pins if pin.split("==")[0] in FOLLOWED]


def section(title: str, found: list[str]) -> list[str]:
    return [f"## {title}", "", *(f"* {each}" for each in found or ["nothing"]), ""]


def downloaded(version: str, folder: Path) -> Path:
    """The wheel's folder."""
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "download", "--no-deps"]
    subprocess.run([*command, "--dest", str(folder), f"sglang=={version}"], check=True)
    (wheel,) = folder.glob("sglang-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(
            folder / "wheel", [n for n in archive.namelist() if n.endswith((".py", "METADATA"))]
        )
    return folder / "wheel"


class Sources:
    """The modules below a folder, as syntax trees."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, module: str) -> Path | None:
        base = self.folder.joinpath(*module.split("."))
        return next((p for p in (base.with_suffix(".py"), base / "__init__.py") if p.is_file()), None)

    def find(self, dotted: str) -> ast.AST | None:
        """The node that a dotted name means: a module, class, function or any name that its module binds."""
        parts = dotted.split(".")
        for cut in range(len(parts), 0, -1):
            path = self.path(".".join(parts[:cut]))
            if path is None:
                continue
            module = _parsed(path)
            node: ast.AST | None = module
            for name in parts[cut:]:
                node = bound(node, name) if node is not None else None
            return node or self._starred(module, parts[cut:])
        return None

    def _starred(self, module: ast.Module, parts: list[str]) -> ast.AST | None:
        """The node in a module from which ``module`` imports all names."""
        imports = (each for each in ast.walk(module) if isinstance(each, ast.ImportFrom))
        starred = [each.module for each in imports if each.module and each.names[0].name == "*"]
        return next(filter(None, (self.find(".".join([name, *parts])) for name in starred)), None)


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def bound(node: ast.AST, name: str) -> ast.AST | None:
    """The statement below ``node`` that binds ``name``, also below conditions and tries."""
    for each in getattr(node, "body", []) + getattr(node, "orelse", []) + getattr(node, "finalbody", []):
        if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            if each.name == name:
                return each
        elif isinstance(each, (ast.Import, ast.ImportFrom)):
            if name in [(alias.asname or alias.name).split(".")[0] for alias in each.names]:
                return each
        elif isinstance(each, (ast.Assign, ast.AnnAssign)):
            targets = each.targets if isinstance(each, ast.Assign) else [each.target]
            if name in [
                found.id for target in targets for found in ast.walk(target) if isinstance(found, ast.Name)
            ]:
                return each
        elif (found := bound(each, name)) is not None:
            return found
    return None


def missing_functions(there: Sources, expected_of: dict[str, tuple[str, ...]]) -> Iterator[str]:
    """Functions that are gone or whose leading parameters are others than ``expected_of`` says."""
    for target, expected in expected_of.items():
        node = there.find(target)
        if node is None:
            yield f"`{target}` is gone"
        elif isinstance(node, ast.FunctionDef):
            arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            found = tuple(each.arg for each in arguments if each.arg != "cls")[: len(expected)]
            if found != expected:
                yield f"`{target}` has parameters {found}, expected {expected}"


@cache
def imported(module: str) -> dict[str, set[str]]:
    """The names of SGLang that ragserve's modules import, with the files that do; of `sglang_ext.versions`
    those of the folder ``module``."""
    names: dict[str, set[str]] = {}
    for room in ROOMS:
        for path in (REPO / room).rglob("*.py"):
            if path.is_relative_to(VERSIONS) and path.parent.name not in ("versions", module):
                continue
            text = path.read_text(encoding="utf-8")
            if not _IMPORTS.search(text):
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sglang":
                    for alias in node.names:
                        names.setdefault(f"{node.module}.{alias.name}", set()).add(
                            str(path.relative_to(REPO))
                        )
                elif isinstance(node, ast.Import):
                    for alias in node.names:
                        if alias.name.split(".")[0] == "sglang":
                            names.setdefault(alias.name, set()).add(str(path.relative_to(REPO)))
    return names


def missing_names(there: Sources, module: str) -> Iterator[str]:
    for name, files in sorted(imported(module).items()):
        if there.find(name) is None:
            yield f"`{name}` is gone (imported in {', '.join(sorted(files))})"


def changed(here: Sources, there: Sources) -> list[str]:
    """The modules that ragserve hooks or imports from, by the number of changed lines."""
    used = [module_for(importlib.metadata.version("sglang")), module_for(_version(there))]
    names = [name for module in used for name in (*functions(module), *imported(module))]
    modules = {module_of(here, name) for name in names}
    counted = []
    for module in sorted(filter(None, modules)):
        old, new = (lines_of(each.path(module)) for each in (here, there))
        marks = [
            line[0] for line in difflib.unified_diff(old, new, n=0) if not line.startswith(("+++", "---"))
        ]
        if added_or_removed := marks.count("+") + marks.count("-"):
            counted.append((added_or_removed, f"`{module}`: +{marks.count('+')} -{marks.count('-')} lines"))
    return [text for _, text in sorted(counted, reverse=True)]


def module_of(sources: Sources, dotted: str) -> str:
    """The longest part of a dotted name that is a module."""
    parts = dotted.split(".")
    cuts = (".".join(parts[:cut]) for cut in range(len(parts), 0, -1))
    return next((name for name in cuts if sources.path(name)), "")


def lines_of(path: Path | None) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path else []


def _metadata(there: Sources) -> str:
    (metadata,) = there.folder.glob("sglang-*.dist-info/METADATA")
    return metadata.read_text(encoding="utf-8")


def _version(there: Sources) -> str:
    return _metadata(there).partition("\nVersion: ")[2].partition("\n")[0]


def requirements(there: Sources) -> list[str]:
    """Requirements that differ from the installed version's; those of extras are left out."""
    new = set(re.findall(r"^Requires-Dist: (.*)$", _metadata(there), re.MULTILINE))
    old = set(importlib.metadata.requires("sglang") or [])
    found = [f"now `{each}`" for each in sorted(new - old)] + [
        f"before `{each}`" for each in sorted(old - new)
    ]
    return [each for each in found if "extra ==" not in each]


if __name__ == "__main__":
    sys.exit(main())
