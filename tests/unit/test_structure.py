"""The house: what imports what, what costs nothing to import, and that the documents say what is true."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from sglang_ext.wire.protocol import CPU_SGLANG, GPU_SGLANG
from tests.groups import groups
from tests.unit.field_writers import FieldWriters

REPO = Path(__file__).resolve().parents[2]
RESULTS = REPO / "benchmarks" / "results"
ROOMS = {
    "ragserve": REPO / "ragserve",
    "ragserve_index": REPO / "index" / "ragserve_index",
    "sglang_ext": REPO / "sglang_ext",
    "ragserve_kernels": REPO / "kernels" / "ragserve_kernels",
}
HEAVY = (
    "torch",
    "sglang",
    "faiss",
    "sentence_transformers",
    "transformers",
    "chonkie",
    "pypdfium2",
    "trafilatura",
)
PLAIN_DATA = ("sglang_ext.documents.remote.document_values", "sglang_ext.wire")  # open to ragserve
MAX_LINES = 450
BESIDE_SGLANG = (
    "ragserve.engine.",
    "ragserve.cache.folder",
    "ragserve.verification.calibration.streaming_heads",
    "ragserve.answering.sessions.sentence_choice",
)  # may import sglang_ext


def modules(room: str) -> Iterator[tuple[str, Path]]:
    for path in sorted(ROOMS[room].rglob("*.py")):
        parts = path.relative_to(ROOMS[room].parent).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


@dataclass(frozen=True)
class Source:
    """What the tests ask of a file: modules of ours that it imports anywhere, functions and `TYPE_CHECKING`
    blocks included, the classes that it defines, the lines of its asserts, and its docstring.
    """

    imports: frozenset[str]
    classes: tuple[str, ...]
    asserts: tuple[int, ...]
    docstring: str | None


@cache
def read(path: Path) -> Source:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found: set[str] = set()
    classes: list[str] = []
    asserts: list[int] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import: write the whole name"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ClassDef):
            classes.append(node.name)
        elif isinstance(node, ast.Assert):
            asserts.append(node.lineno)
    ours = frozenset(name for name in found if name.split(".")[0] in ROOMS)
    return Source(ours, tuple(classes), tuple(asserts), ast.get_docstring(tree))


def allowed(room: str, module: str, imported: str) -> bool:
    """The arrows. ``imported`` may be a module or a name in one."""
    target = imported.split(".")[0]
    if target == room:
        return True
    if room == "ragserve":
        plain = imported == "sglang_ext" or imported.startswith(PLAIN_DATA)
        inside = target == "sglang_ext" and module.startswith(BESIDE_SGLANG)
        measured = target == "ragserve_kernels" and module.startswith("ragserve.bench.")
        return target == "ragserve_index" or plain or inside or measured
    if room == "ragserve_index":
        errors = imported in ("ragserve", "ragserve.errors") or imported.startswith("ragserve.errors.")
        return errors or imported.startswith("sglang_ext.wire.protocol.")
    return room == "sglang_ext" and target == "ragserve_kernels"


@pytest.mark.parametrize("room", ROOMS)
def test_arrows_point_one_way(room: str) -> None:
    wrong = [
        f"{module} imports {imported}"
        for module, path in modules(room)
        for imported in sorted(read(path).imports)
        if not allowed(room, module, imported)
    ]
    assert not wrong, "\n".join(wrong)


SERVING = (
    *("answering", "api", "cache", "engine", "fleet", "ingest", "profiles", "programs", "retrieval"),
    *("tenants", "verification"),
)
OFFLINE = "ragserve.verification.calibration"  # runs in processes of its own
ENGINE = {  # package of sglang_ext: those that it may import
    "wire": set(),
    "versions": set(),
    "diagnostics": {"sglang_internals", "wire"},
    "ranks": {"versions"},
    "sglang_internals": {"stages", "state", "versions", "wire"},
    "stages": set(),
    "tensors": {"sglang_internals"},
    "cpu": {"attention", "versions"},
    "analysis": {"ranks", "sglang_internals", "tensors", "versions", "wire"},
    "documents": {"cpu", "versions", "wire"},
    "kv_offload": {
        *("analysis", "documents", "ranks", "sglang_internals", "stages", "state", "tensors", "versions"),
        "wire",
    },
    "context": {
        *("analysis", "diagnostics", "documents", "kv_offload", "ranks", "sglang_internals", "stages"),
        *("tensors", "versions", "wire"),
    },
    "attention": {
        *("context", "documents", "kv_offload", "ranks", "sglang_internals", "stages", "state", "tensors"),
        *("versions", "wire"),
    },
}  # process, plugin.py and state.py see them all
NEVER = {  # package: packages that it must not import, directly
    **{
        f"ragserve.{room}": ("ragserve.bench", "ragserve.commands", "ragserve.eval", OFFLINE)
        for room in SERVING
    },
    "ragserve.eval": ("ragserve.bench", "ragserve.commands", OFFLINE),
    "ragserve.bench": ("ragserve.commands", OFFLINE),
    "sglang_ext.context.selection": ("sglang_ext.context.compose", "sglang_ext.context.scheduler"),
    "sglang_ext.context.recompute": ("sglang_ext.context.compose", "sglang_ext.context.scheduler"),
    "sglang_ext.context.compose": ("sglang_ext.context.scheduler",),
}


@pytest.mark.parametrize("package", ENGINE)
def test_packages_of_the_engine_import_those_below_them(package: str) -> None:
    wrong = [
        f"{module} imports {name}"
        for module, path in modules("sglang_ext")
        if inside(module, f"sglang_ext.{package}")
        for name in sorted(read(path).imports)
        if name.startswith("sglang_ext.") and name.split(".")[1] not in ENGINE[package] | {package}
    ]
    assert not wrong, "\n".join(wrong)


def test_the_engine_has_no_drawers() -> None:
    """At most 16 files in a folder, four loose in sglang_ext."""
    folders: dict[str, int] = {}
    for _, path in modules("sglang_ext"):
        folder = path.parent.relative_to(REPO).as_posix()
        folders[folder] = folders.get(folder, 0) + 1
    assert folders.pop("sglang_ext") <= 4
    assert max(folders.values()) <= 16, folders


def inside(module: str, room: str) -> bool:
    return module == room or module.startswith(f"{room}.")


def wrong_arrows(module: str, imported: Set[str]) -> list[str]:
    """A sentence for each import that `NEVER` forbids."""
    return [
        f"{module} imports {name}: {room} must not depend on {target}; move what both need below them"
        for room, targets in NEVER.items()
        if inside(module, room)
        for target in targets
        for name in sorted(imported)
        if inside(name, target) and not inside(module, target)
    ]


def test_rooms_do_not_depend_on_rooms_above_them() -> None:
    wrong = [
        line
        for room in ROOMS
        for module, path in modules(room)
        for line in wrong_arrows(module, read(path).imports)
    ]
    assert not wrong, "\n".join(wrong)
    assert wrong_arrows("ragserve.engine.local", {"ragserve.bench.decode"}), "and a wrong one is seen"
    assert not wrong_arrows("ragserve.engine.local", {"ragserve.profiles.decode", "ragserve.benchmarks"})


def test_no_file_imports_itself_by_way_of_others() -> None:
    known = {module for room in ROOMS for module, _ in modules(room)}
    arrows = {
        module: {name if name in known else name.rpartition(".")[0] for name in read(path).imports}
        & known - {module}
        for room in ROOMS
        for module, path in modules(room)
    }
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, f"a circle of imports: {' -> '.join((*way[way.index(module) :], module))}"
        if module not in done:
            for name in sorted(arrows[module]):
                visit(name, (*way, module))
            done.add(module)

    for module in sorted(arrows):
        visit(module, ())


ROLES = {
    "__init__.py",
    "base.py",
    "config.py",
    "errors.py",
    "metrics.py",
    "naive.py",
    "triton.py",
    "types.py",
}
SAME_SUBJECT = {  # files of one name in several rooms, which all are about the same thing
    "auto.py", "cache.py", "context.py", "costs.py",
    "decode.py", "distribution.py", "evictions.py", "folder.py", "ingest.py", "preview.py",
    "query.py", "retrieval.py", "samkv.py", "streaming_heads.py", "warm.py",
}  # fmt: skip


def test_a_name_means_one_thing() -> None:
    """No two files of one name but those of the same subject, and no class name twice."""
    files: dict[str, list[str]] = {}
    classes: dict[str, list[str]] = {}
    for room in ROOMS:
        for module, path in modules(room):
            files.setdefault(path.name, []).append(module)
            for name in read(path).classes:
                classes.setdefault(name, []).append(module)
    twice = {
        name: where for name, where in files.items() if len(where) > 1 and name not in ROLES | SAME_SUBJECT
    }
    assert not twice, f"files of one name and different subjects: {twice}"
    twice = {name: where for name, where in classes.items() if len(where) > 1}
    assert not twice, f"classes of one name: {twice}"


def test_the_scan_sees_imports_inside_functions(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text(
        "def f():\n    from sglang_ext.process.launch import y\n    import ragserve.errors\n    import json\n"
    )
    assert read(path).imports == {"sglang_ext.process.launch.y", "ragserve.errors"}
    assert not allowed("ragserve", "ragserve.api.app", "sglang_ext.process.launch")
    assert allowed("ragserve", "ragserve.api.app", "sglang_ext.wire.protocol.ContextPlan")
    assert not allowed("ragserve", "ragserve.api.app", "ragserve_kernels")
    assert allowed("ragserve", "ragserve.engine.local", "sglang_ext.process.launch")
    assert not allowed("ragserve_index", "ragserve_index.store", "ragserve.config")
    assert allowed("ragserve_index", "ragserve_index.registry", "sglang_ext.wire.protocol.NAMESPACE")
    assert not allowed(
        "ragserve_index", "ragserve_index.store", "sglang_ext.wire.request_options.RequestOptions"
    )


def test_nothing_is_checked_by_assert_at_run_time() -> None:
    """`python -O` drops an assert, and its message says nothing. Triton's `tl.static_assert` is no assert."""
    asserting = [
        f"{module}, line {line}"
        for room in ROOMS
        for module, path in modules(room)
        for line in read(path).asserts
    ]
    assert not asserting, f"raise an error of ragserve/errors.py instead: {asserting}"


WRITERS = {  # class of shared state: the module that writes its fields; None: its own methods only
    "DecodeState": None,
    "Selection": "sglang_ext.attention.decode.step_planner",
    "KeptSelection": "sglang_ext.attention.offload.lagged_selection",
    "ObservedQueries": None,
    "OffloadState": None,
    "SegmentedPrompt": "sglang_ext.attention.offload.segmented_prefill",
    "Account": None,
    "OffloadedRow": "sglang_ext.kv_offload.offloaded_rows",
    "HeldBlocks": "sglang_ext.kv_offload.resident.resident_slots",
    "SelectionLoads": None,
    "ComposedContext": "sglang_ext.context.scheduler.selection_stage",
    "LocatedDocuments": "sglang_ext.context.compose.locate",
    "ContextPlace": "sglang_ext.context.scheduler.admission",
    "FillOutcome": None,
}


def wrong_writes(sources: Sequence[tuple[str, ast.Module]]) -> list[str]:
    """A sentence for each field of `WRITERS` that another module assigns. A part is put in its place by who
    writes the part, too."""
    return [
        f"{write.module}, line {write.line} assigns {write.owner}.{write.field}: only {writer} may"
        for write in FieldWriters(WRITERS, sources).writes()
        if write.module not in {writer := WRITERS[write.owner], *(WRITERS[part] for part in write.part)}
    ]


def test_each_part_of_shared_state_is_written_by_one_module() -> None:
    sources = [
        (module, ast.parse(path.read_text(encoding="utf-8"))) for module, path in modules("sglang_ext")
    ]
    assert not wrong_writes(sources)
    bad = """
def f(self, req, row: Row, kept: KeptSelection):
    state = self._planner.state(req)
    state.selection.newest, x = 3, 4
    account = row.state.account
    account.pages += 1
    kept.current = state.kept = None
    for i, each in enumerate(self.rows):
        each.state.offload.row = None
"""
    found = wrong_writes([*sources, ("sglang_ext.bad", ast.parse(bad))])
    fields = [line.split()[4].strip(":") for line in found]
    assert fields == [
        *("Selection.newest", "Account.pages", "KeptSelection.current", "DecodeState.kept"),
        "OffloadState.row",
    ], "and wrong ones are seen"


def test_importing_the_product_loads_nothing_heavy() -> None:
    names = [name for name, _ in modules("ragserve")]
    script = f"""
import importlib, sys
for name in {names!r}:
    importlib.import_module(name)
    loaded = [heavy for heavy in {HEAVY!r} if heavy in sys.modules]
    if loaded:
        sys.exit(f"importing {{name}} loads {{', '.join(loaded)}}")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=REPO, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_module_says_what_it_is() -> None:
    paths = [path for room in ROOMS for _, path in modules(room)]
    paths += [path for folder in ("benchmarks", "examples") for path in sorted((REPO / folder).rglob("*.py"))]
    silent = [str(path.relative_to(REPO)) for path in paths if read(path).docstring is None]
    assert not silent, f"no docstring: {', '.join(silent)}"


def test_no_file_has_to_be_split() -> None:
    folders = ["ragserve", "index", "sglang_ext", "kernels", "tests", "scripts", "benchmarks", "examples"]
    paths = [
        path
        for folder in folders
        for path in (REPO / folder).rglob("*")
        if path.suffix in {".py", ".md", ""} and path.is_file()
    ]
    paths = [
        path for path in paths if "corpus/files" not in path.as_posix() and "__pycache__" not in path.parts
    ]
    long = {
        str(path.relative_to(REPO)): n
        for path in paths
        if (n := len(path.read_text(encoding="utf-8").splitlines())) > MAX_LINES
    }
    assert not long, f"over {MAX_LINES} lines: {long}"


def test_the_build_ships_every_package() -> None:
    config = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages = {name for room in ROOMS for name, path in modules(room) if path.name == "__init__.py"}
    data = {f"ragserve.bundled.{folder.replace('/', '.')}" for folder in ("examples/models", "requirements")}
    assert set(config["packages"]) == packages | data
    for name in data:
        assert (REPO / config["package-dir"][name]).is_dir(), name
        assert config["package-data"][name], name
    for room, folder in ROOMS.items():
        assert (folder / "py.typed").exists(), room
        assert "py.typed" in config["package-data"][room]


def test_the_pinned_sglang_is_the_one_that_the_hooks_are_written_for() -> None:
    for name, version in {"cpu.txt": CPU_SGLANG, "product.txt": GPU_SGLANG}.items():
        pins = (REPO / "requirements" / name).read_text().split()
        assert f"sglang=={version}" in pins, name


def test_pre_commit_runs_the_pinned_tools() -> None:
    import yaml

    config = yaml.safe_load((REPO / ".pre-commit-config.yaml").read_text())
    tools = {
        hook["entry"].split()[0].removeprefix(".venv/bin/")
        for repo in config["repos"]
        for hook in repo["hooks"]
    }
    pinned = set(re.findall(r"^([\w-]+)==", (REPO / "requirements" / "dev.txt").read_text(), re.MULTILINE))
    assert tools == {"ruff", "mypy"}
    assert tools <= pinned


def test_every_file_of_tests_is_in_one_group_with_those_of_its_engine() -> None:
    """Another group would start that engine once more."""
    made = groups()
    for file in sorted((REPO / "tests").rglob("test_*.py")):
        path = file.relative_to(REPO)
        mine = [
            group.name
            for group in made
            if any(path.is_relative_to(each) for each in group.paths)
            and not any(path.is_relative_to(each) for each in group.ignored)
        ]
        assert len(mine) == 1, path
        if mine == ["other engines"]:
            assert not re.search(r"\b(?:quick|locked)_server\b", file.read_text(encoding="utf-8")), path
