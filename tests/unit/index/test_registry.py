"""The registry file itself: damaged, foreign, from the future, read-only. It is the only copy, so nothing is
repaired in silence.
"""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ragserve.errors import RagserveError, StorageFull
from ragserve_index import IndexStore
from ragserve_index.errors import RegistryDamaged
from tests.campaigns.disk import Volume
from tests.unit.index.index_samples import assert_clean, fill, item, make, texts, vectors_of


def closed(data_dir: Path) -> Path:
    with make(data_dir) as store:
        fill(store, 200)
    return data_dir / "ragserve.sqlite3"


def test_no_database_at_all(tmp_path: Path) -> None:
    path = closed(tmp_path)
    path.write_bytes(b"not a database " * 1000)
    with pytest.raises(RegistryDamaged, match="damaged") as caught:
        IndexStore(tmp_path)
    assert str(path) in str(caught.value)
    assert "backup" in str(caught.value)


def test_a_damaged_page_is_found_by_check(tmp_path: Path) -> None:
    path = closed(tmp_path)
    content = bytearray(path.read_bytes())
    for page in range(3, len(content) // 8192):
        content[page * 8192 : page * 8192 + 4000] = os.urandom(4000)
    path.write_bytes(content)
    with pytest.raises(RegistryDamaged, match="damaged") as caught, IndexStore(tmp_path) as store:
        store.check()
    assert str(path) in str(caught.value)


def test_rows_that_do_not_agree_are_found_by_check(tmp_path: Path) -> None:
    path = closed(tmp_path)
    with sqlite3.connect(path) as connection:
        connection.execute("DELETE FROM chunks WHERE chunk_id = 7")
        connection.execute("UPDATE vectors SET data = zeroblob(3) WHERE first_id = 11")
        connection.execute("UPDATE namespaces SET n_tokens = 1")
    connection.close()
    with IndexStore(tmp_path) as store:
        problems = " ".join(store.check()[0].problems)
    assert "2000 chunks, 1999 rows" in problems
    assert "wrong length: [11]" in problems
    assert "the namespace says" in problems


def test_another_programs_database(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "ragserve.sqlite3") as connection:
        connection.execute("CREATE TABLE theirs (x)")
    connection.close()
    with pytest.raises(RegistryDamaged, match="not ragserve's"):
        IndexStore(tmp_path)


def test_a_format_from_the_future(tmp_path: Path) -> None:
    path = closed(tmp_path)
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(RegistryDamaged, match="format 99") as caught:
        IndexStore(tmp_path)
    assert caught.value.code == "registry_format"


def test_a_data_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("x")
    with pytest.raises(RagserveError, match="data directory"):
        IndexStore(tmp_path / "data")


# no room on the disk

_FILLS = """
    import resource, sys
    from pathlib import Path
    from index_samples import assert_clean, item, make, texts, vectors_of
    from ragserve.errors import StorageFull
    from ragserve_index import IndexStore

    data_dir, limit = Path(sys.argv[1]), int(sys.argv[2])
    store = make(data_dir)
    store.replace_documents("n", [item("first", 50)])
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    written = 0
    try:
        for i in range(1000):
            store.replace_documents("n", [item(f"d{i}", 100)])
            written += 1
    except StorageFull as error:
        assert "No room" in str(error) and str(data_dir) in str(error) and error.status == 507, error
    else:
        raise SystemExit("the disk never filled")
    assert store.namespace("n").n_documents == written + 1, (store.namespace("n"), written)
    try:
        store.save()
    except StorageFull:
        pass
    else:
        assert limit, "an index file fitted on a full disk"
    assert texts(store, vectors_of("first", 0, n=50)[7], 1) == ["first#0.7"]
    assert not list((data_dir / "indexes").glob("*.tmp"))
    assert_clean(store)
    store.close()
    print(written)
"""


def fill_disk(data_dir: Path, limit: int) -> int:
    """Documents written, beside the first, before there was no room; checks on the way are in the script."""
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_FILLS), str(data_dir), str(limit)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(here), *sys.path])},
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def assert_usable_again(data_dir: Path, written: int) -> None:
    with IndexStore(data_dir) as store:
        assert store.namespace("n").n_documents == written + 1
        assert_clean(store)
        store.replace_documents("n", [item("after", 50)])
        store.save()
        assert texts(store, vectors_of("after", 0, n=50)[9], 1) == ["after#0.9"]
        assert_clean(store)


def test_file_size_limit(tmp_path: Path) -> None:
    written = fill_disk(tmp_path, 3 << 20)
    assert written > 10
    assert_usable_again(tmp_path, written)


def test_writes_go_on_when_a_read_only_disk_can_be_written_again(tmp_path: Path) -> None:
    try:
        volume = Volume(tmp_path / "disk")
    except subprocess.CalledProcessError:
        pytest.skip("needs the right to mount a small disk")
    try:
        with make(volume.path / "data") as store:
            fill(store, 50)
            with store.database.read():  # it keeps the idle connection, so that others are opened
                with volume.read_only():
                    assert store.documents("n")
                    with pytest.raises(RagserveError, match="cannot be opened for writing"):
                        store.replace_documents("n", [item("new", 2)])
                    assert store.documents("n")
                store.replace_documents("n", [item("new", 2)])
            assert "new" in {document.source for document in store.documents("n")}
    finally:
        subprocess.run(["umount", str(volume.path)], check=True)


def test_full_disk(tmp_path: Path) -> None:
    mounted = tmp_path / "disk"
    mounted.mkdir()
    if (
        os.geteuid() != 0
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(mounted)], capture_output=True
        ).returncode
    ):
        pytest.skip("needs the right to mount a small disk")
    try:
        written = fill_disk(mounted / "data", 0)
        assert written > 10
        subprocess.run(["mount", "-o", "remount,size=64m", str(mounted)], check=True)
        assert_usable_again(mounted / "data", written)
    finally:
        subprocess.run(["umount", str(mounted)], check=True)


def test_a_directory_that_starts_on_a_full_disk(tmp_path: Path) -> None:
    mounted = tmp_path / "disk"
    mounted.mkdir()
    if (
        os.geteuid() != 0
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(mounted)], capture_output=True
        ).returncode
    ):
        pytest.skip("needs the right to mount a small disk")
    try:
        (mounted / "ballast").write_bytes(b"x" * (60 << 10))
        with pytest.raises(StorageFull):
            IndexStore(mounted / "data")
    finally:
        subprocess.run(["umount", str(mounted)], check=True)
