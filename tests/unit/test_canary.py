"""The list of what another SGLang changes, made from sources of which nothing is imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_ext.process import hooks
from tests import canary


def written(folder: Path, **modules: str) -> canary.Sources:
    for name, text in modules.items():
        path = folder.joinpath(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return canary.Sources(folder)


@pytest.mark.parametrize(
    ("text", "is_there"),
    [
        ("class Cache:\n    def match(self): ...", True),
        ("class Cache:\n    def find(self): ...", False),
        ("if FAST:\n    class Cache:\n        async def match(self): ...", True),
        ("class Cache:\n    match = None", True),
        ("from sglang.moved import *", True),
        ("def match(self): ...", False),
    ],
)
def test_a_name_is_found_where_it_is_bound(tmp_path: Path, text: str, is_there: bool) -> None:
    moved = "class Cache:\n    def match(self): ..."
    sources = written(tmp_path, sglang__cache=text, sglang__moved=moved)
    assert (sources.find("sglang.cache.Cache.match") is not None) is is_there


def test_what_is_gone_and_what_has_other_parameters_is_listed(tmp_path: Path) -> None:
    expected = {f"sglang.pool.{name}": ("size", "device") for name in ("same", "other", "gone")}
    pool = "def same(size, device, more=1): ...\ndef other(size, *, place): ..."
    found = list(canary.missing_functions(written(tmp_path, sglang__pool=pool), expected))
    assert found == [
        "`sglang.pool.other` has parameters ('size', 'place'), expected ('size', 'device')",
        "`sglang.pool.gone` is gone",
    ]


def test_the_installed_version_has_all_that_ragserve_imports() -> None:
    import sglang

    sources = canary.Sources(Path(sglang.__path__[0]).parent)
    module = canary.module_for(sglang.__version__)
    functions = canary.functions(module)
    assert {hook.target for hook in hooks.HOOKS} <= functions.keys()
    assert len(canary.imported(module)) > 50
    assert [*canary.missing_names(sources, module), *canary.missing_functions(sources, functions)] == []


def test_a_version_without_a_folder_of_its_own_is_compared_with_the_newest() -> None:
    assert canary.module_for("0.5.17") == "sglang_0_5_17"
    assert canary.module_for("0.9") == max(path.name for path in canary.VERSIONS.glob("sglang_*"))


RESULTS = """<testsuites><testsuite><properties><property name="sglang" value="{version}"/></properties>
<testcase classname="tests.integration.test_engine" name="test_starts[x]"/>
<testcase classname="tests.integration.test_engine" name="test_ends">{ends}</testcase>
<testcase classname="tests.unit.test_gpu" name="test_runs"><skipped message="no GPU"/></testcase>
</testsuite></testsuites>"""


def test_results_are_counted_by_file_and_later_ones_replace_earlier(tmp_path: Path) -> None:
    first, later = tmp_path / "first.xml", tmp_path / "later.xml"
    failure = '<failure message="AssertionError: no&#10;assert 0">...</failure>'
    first.write_text(RESULTS.format(version="9.9", ends=failure))
    later.write_text(RESULTS.format(version="9.9", ends=""))
    tests = canary.outcomes([first], "9.9")
    assert tests["tests/integration/test_engine.py::test_ends"][1:] == ("failed", "AssertionError: no")
    assert "| `tests/integration/test_engine.py` | 1 | 1 | 0 |" in canary.table(tests)
    rows = canary.table(canary.outcomes([first, later], "9.9"))
    assert "| `tests/integration/test_engine.py` | 2 | 0 | 0 |" in rows
    assert "| `tests/unit/test_gpu.py` | 0 | 0 | 1 |" in rows
    with pytest.raises(SystemExit, match=r"results of 9\.9"):
        canary.outcomes([first], "9.8")
