"""Files that a command line names: each real file once, whatever links and loops there are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ragserve.errors import InvalidRequest
from ragserve.ingest.sources import clean_name, parse_metadata, scan


def tree(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)


def relative(sources: list[str], root: Path) -> list[str]:
    return [os.path.relpath(source, root.resolve()) for source in sources]


def test_directories_are_read_in_order_and_deeply_only_when_asked(tmp_path: Path) -> None:
    tree(tmp_path, "b.md", "a.txt", "sub/c.md", "sub/deeper/d.md", ".git/e.md", ".hidden.md")
    assert relative(scan([str(tmp_path)]).sources, tmp_path) == ["a.txt", "b.md"]
    found = scan([str(tmp_path)], recursive=True)
    assert relative(found.sources, tmp_path) == ["a.txt", "b.md", "sub/c.md", "sub/deeper/d.md"]
    assert (found.failed, found.roots) == ([], [str(tmp_path.resolve())])


def test_loops_end_and_every_file_counts_once(tmp_path: Path) -> None:
    tree(tmp_path, "a.txt", "sub/b.txt", "sub/deeper/c.txt")
    (tmp_path / "sub/deeper/loop").symlink_to(tmp_path)
    (tmp_path / "sub/also").symlink_to(tmp_path / "sub/deeper")
    (tmp_path / "again.txt").symlink_to("a.txt")
    os.link(tmp_path / "a.txt", tmp_path / "hard.txt")
    (tmp_path / "self").symlink_to("self")
    found = scan([str(tmp_path), str(tmp_path / "sub"), str(tmp_path / "a.txt")], recursive=True)
    assert sorted(os.path.basename(source) for source in found.sources) == ["a.txt", "b.txt", "c.txt"]
    assert [os.path.basename(source) for source, _ in found.failed] == ["self"]


def test_links_out_of_the_folder_are_skipped_unless_they_are_wanted(tmp_path: Path) -> None:
    root = tmp_path / "root"
    tree(tmp_path, "root/a.txt", "root/sub/b.txt", "root-2/c.txt", "elsewhere/d.txt", "e.txt")
    (root / "sub/inside.txt").symlink_to(root / "a.txt")
    (root / "sub/folder").symlink_to(tmp_path / "elsewhere")
    (root / "file.txt").symlink_to("../e.txt")
    (root / "neighbour").symlink_to(tmp_path / "root-2")  # its name starts as the folder's
    (root / "up").symlink_to("..")
    found = scan([str(root)], recursive=True)
    assert relative(found.sources, root) == ["a.txt", "sub/b.txt"]
    assert sorted(relative([source for source, _ in found.skipped], root)) == [
        "file.txt",
        "neighbour",
        "sub/folder",
        "up",
    ]
    reason = dict(found.skipped)[str(root / "file.txt")]
    assert str(tmp_path / "e.txt") in reason
    assert "--follow-symlinks" in reason

    followed = scan([str(root)], recursive=True, follow_symlinks=True)
    assert sorted(relative(followed.sources, tmp_path)) == [
        "e.txt",
        "elsewhere/d.txt",
        "root-2/c.txt",
        "root/a.txt",
        "root/sub/b.txt",
    ]
    assert followed.skipped == []
    both = scan([str(root), str(tmp_path / "root-2")], recursive=True)
    assert relative(both.sources, tmp_path) == ["root/a.txt", "root-2/c.txt", "root/sub/b.txt"]
    given = scan([str(root / "file.txt")])  # a link that is named itself was meant
    assert relative(given.sources, tmp_path) == ["e.txt"]


def test_what_cannot_be_read_is_recorded_with_its_reason(tmp_path: Path) -> None:
    tree(tmp_path, "a.txt")
    (tmp_path / "broken").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_text("x")
    found = scan([str(tmp_path), str(tmp_path / "missing.txt")])
    assert relative(found.sources, tmp_path) == ["a.txt"]
    reasons = {os.path.basename(source): reason for source, reason in found.failed}
    assert reasons == {
        "broken": "a broken symbolic link",
        "missing.txt": "no such file or directory",
        "caf\\xe9.txt": "its name is not UTF-8 (rename it)",
    }
    assert [os.path.basename(source) for source, _ in found.skipped] == ["pipe"]


def test_globs_choose_by_name_or_by_path(tmp_path: Path) -> None:
    tree(tmp_path, "a.md", "a.txt", "docs/b.md", "docs/old/c.md", "src/d.md")
    assert relative(scan([str(tmp_path)], recursive=True, globs=["*.md"]).sources, tmp_path) == [
        "a.md",
        "docs/b.md",
        "docs/old/c.md",
        "src/d.md",
    ]
    assert relative(
        scan([str(tmp_path)], recursive=True, globs=["docs/*.md", "*.txt"]).sources, tmp_path
    ) == [
        "a.txt",
        "docs/b.md",
        "docs/old/c.md",
    ]
    assert scan([str(tmp_path / "a.txt")], globs=["*.md"]).sources == [str((tmp_path / "a.txt").resolve())]


def test_a_directory_that_came_into_a_followed_one_is_matched_from_there(tmp_path: Path) -> None:
    root = tmp_path.resolve()
    tree(root, "guides/a.md", "old/guides/b.md", "other/c.md")
    whole = scan([str(root)], recursive=True, globs=["guides/*.md"])
    moved = [str(root / name) for name in ("guides", "old", "other")]
    followed = scan(moved, recursive=True, globs=["guides/*.md"], within=[str(root)])
    assert relative(followed.sources, root) == relative(whole.sources, root) == ["guides/a.md"]


def test_the_data_directory_is_never_ingested(tmp_path: Path) -> None:
    tree(tmp_path, "a.txt", "ragserve-data/registry.txt")
    found = scan([str(tmp_path)], recursive=True, exclude=tmp_path / "ragserve-data")
    assert relative(found.sources, tmp_path) == ["a.txt"]


def test_urls_are_sources_as_they_are() -> None:
    found = scan(["https://example.org/a?b=c", "HTTP://EXAMPLE.ORG/", "https://example.org/a?b=c"])
    assert found.sources == ["https://example.org/a?b=c", "HTTP://EXAMPLE.ORG/"]


def test_metadata_values_are_typed_so_that_ranges_work() -> None:
    given = ["lang=en", "year=2021", "score=-0.5", "draft=false", "code=007", "note=a=b", "empty=", "big=1e5"]
    assert parse_metadata(given) == {
        "lang": "en",
        "year": 2021,
        "score": -0.5,
        "draft": False,
        "code": "007",
        "note": "a=b",
        "empty": "",
        "big": "1e5",
    }
    for wrong in ("lang", "=x"):
        with pytest.raises(InvalidRequest):
            parse_metadata([wrong])


@pytest.mark.parametrize(
    ("given", "cleaned"),
    [
        ("report.pdf", "report.pdf"),
        ("../../etc/passwd", "etc/passwd"),
        ("C:\\Users\\me\\a.txt", "C:/Users/me/a.txt"),
        ("/absolute/./a.txt", "absolute/a.txt"),
        ("a\x00b\n.txt", "ab.txt"),
        ("https://example.org/x", "https://example.org/x"),
    ],
)
def test_client_names_become_labels(given: str, cleaned: str) -> None:
    assert clean_name(given) == cleaned


@pytest.mark.parametrize(
    "given",
    ["", "..", "/", "\x00", "a" * 256, "\ud800.txt"],
    ids=["empty", "up", "root", "nul", "long", "surrogate"],
)
def test_unusable_names_are_refused(given: str) -> None:
    with pytest.raises(InvalidRequest):
        clean_name(given)
