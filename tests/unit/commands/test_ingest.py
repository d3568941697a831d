"""`ragserve ingest` and `ragserve docs` as processes: their output, exit status, and what a kill or a full
disk leaves behind.
"""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer

from ragserve import cli
from ragserve.ingest.prune import every_document
from ragserve.retrieval.embedder import Embedder
from ragserve_index import IndexStore
from tests.conftest import EXHAUSTIVE, REPO
from tests.unit.commands.quick_main import HELD, QuickEmbedder

COMMAND = (sys.executable, "-m", "ragserve.cli")
QUICK = (sys.executable, "-m", "tests.unit.commands.quick_main")  # as `quick`
ENVIRONMENT = {
    **os.environ,
    "HF_HUB_OFFLINE": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "PYTHONPATH": os.pathsep.join(filter(None, (str(REPO), os.environ.get("PYTHONPATH")))),
}


def start(
    *args: str, cwd: Path, command: tuple[str, ...] = COMMAND, env: dict[str, str] = ENVIRONMENT
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*command, *args], cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


class Cli:
    """`ragserve ...` in this process, with the session's embedder: importing torch for every command would
    take most of the time.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], cwd: Path) -> None:
        self._monkeypatch, self._capfd = monkeypatch, capfd
        monkeypatch.chdir(cwd)

    def __call__(self, *args: str, stdin: bytes = b"") -> Done:
        self._monkeypatch.setattr(sys, "argv", ["ragserve", *args])
        self._monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        app = typer.Typer(no_args_is_help=True)  # each run registers its command
        app.callback()(lambda: None)
        self._monkeypatch.setattr(cli, "app", app)
        self._capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = self._capfd.readouterr()
        return Done(int(ended.value.code or 0), out, err)


@pytest.fixture
def ragserve(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, embedder: Embedder
) -> Cli:
    monkeypatch.setattr("ragserve.retrieval.embedder.Embedder.of", lambda *_args, **_options: embedder)
    return Cli(monkeypatch, capfd, tmp_path)


@pytest.fixture
def quick(ragserve: Cli, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """`ragserve` with the embedder of `QUICK`."""
    monkeypatch.setattr("ragserve.retrieval.embedder.Embedder.of", lambda *_args, **_options: QuickEmbedder())
    return ragserve


def contents(data_dir: Path) -> dict[str, list[tuple[str, int, int]]]:
    """Every document's chunks by source; checks the index against the registry on the way."""
    with IndexStore(data_dir) as store:
        assert all(report.ok for report in store.check(None))
        return {
            document.source: [
                (chunk.text, chunk.start, chunk.end)
                for chunk in store.document_chunks(info.name, document.doc_id)
            ]
            for info in store.namespaces()
            for document in every_document(store, info.name)
        }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    folder.mkdir()
    for name in ("whales", "otters"):
        (folder / f"{name}.md").write_text(f"# {name.title()}\n\nA few words about {name}.\n")
    return folder


def test_report_exit_status_and_docs(folder: Path, tmp_path: Path, ragserve: Cli) -> None:
    (folder / "broken.pdf").write_bytes(b"%PDF-1.4 nothing")
    done = ragserve("ingest", "docs", "-n", "sea", "--metadata", "topic=animals", "--json")
    assert done.returncode == 3, done.stderr
    report = json.loads(done.stdout)  # all of stdout is the report
    assert report["files"] == {
        "total": 3,
        "indexed": 2,
        "unchanged": 0,
        "failed": 1,
        "skipped": 0,
        "removed": 0,
        "warmed": 0,
    }
    assert [os.path.basename(failure["source"]) for failure in report["failures"]] == ["broken.pdf"]
    (folder / "broken.pdf").unlink()
    done = ragserve("ingest", "docs", "-n", "sea", "--metadata", "topic=animals")
    assert done.returncode == 0, done.stderr
    assert "unchanged" in done.stdout

    listed = json.loads(ragserve("docs", "ls", "-n", "sea", "--json").stdout)
    assert sorted(document["title"] for document in listed) == ["Otters", "Whales"]
    assert listed[0]["metadata"]["topic"] == "animals"
    shown = json.loads(ragserve("docs", "show", "docs/whales.md", "-n", "sea", "--json").stdout)
    assert "".join(chunk["text"] for chunk in shown["chunks"]) == (folder / "whales.md").read_text()
    checked = ragserve("docs", "check", "--json")
    assert (checked.returncode, [one["problems"] for one in json.loads(checked.stdout)]) == (0, [[]])
    with sqlite3.connect(tmp_path / "ragserve-data" / "ragserve.sqlite3") as connection:
        connection.execute("DROP TABLE lexical_1")
    connection.close()
    checked = ragserve("docs", "check")
    assert checked.returncode == 1
    assert "sea: 2 documents" in checked.stdout
    assert "lexical index cannot be read" in checked.stdout
    assert "--repair" in checked.stderr
    repaired = ragserve("docs", "check", "-n", "sea", "--repair")
    assert (repaired.returncode, repaired.stdout.strip().endswith("repaired")) == (0, True), repaired.stderr
    assert ragserve("docs", "check").returncode == 0
    otters = next(document["doc_id"] for document in listed if document["title"] == "Otters")
    removed = ragserve("docs", "rm", otters, "docs/whales.md", "nothing.md", "-n", "sea")
    assert removed.returncode == 1
    assert "nothing.md" in removed.stderr
    assert contents(tmp_path / "ragserve-data") == {}


def test_standard_input(tmp_path: Path, ragserve: Cli) -> None:
    done = ragserve("ingest", "-", "--name", "notes/today.md", "--json", stdin=b"# Today\n\nIt rained.\n")
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "ragserve-data") == {"notes/today.md": [("# Today\n\nIt rained.\n", 0, 20)]}
    assert list((tmp_path / "ragserve-data" / "uploads").iterdir()) == []


@pytest.mark.parametrize(
    ("args", "status", "words"),
    [
        (("ingest",), 1, "Say what to ingest"),
        (("ingest", "-"), 1, "--name"),
        (("ingest", "docs", "--metadata", "x"), 1, "key=value"),
        (("ingest", "docs", "-n", "a b"), 1, "namespace"),
        (("ingest", "docs", "--chunk-tokens", "1"), 1, "chunk_tokens"),
        (("ingest", "--resume", "job_x"), 1, "no job"),
        (("ingest", "docs", "--model", "no/such-model"), 1, "tokenizer"),
        (("ingest", "docs", "--nonsense"), 2, "--nonsense"),
        (("docs", "ls"), 1, "no data"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
@pytest.mark.usefixtures("folder")
def test_wrong_use_is_explained(args: tuple[str, ...], status: int, words: str, ragserve: Cli) -> None:
    done = ragserve(*args)
    assert (done.returncode, words in " ".join(done.stderr.split()), "Traceback" in done.stderr) == (
        status,
        True,
        False,
    ), done.stderr


def many(folder: Path, n: int) -> None:
    for i in range(n):
        (folder / f"note{i:04d}.txt").write_text(
            f"Note {i} is about the number {i * 7919 % 10007}.\n" * (1 + i % 3)
        )


def wait_for_documents(data_dir: Path, n: int, process: subprocess.Popen[bytes]) -> None:
    """Until ``n`` documents are indexed, or the process ended."""
    deadline = time.monotonic() + 240
    while process.poll() is None and not (data_dir / "ragserve.sqlite3").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with IndexStore(data_dir) as store:
        while process.poll() is None and sum(info.n_documents for info in store.namespaces()) < n:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for temporary files whose name is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        yield Path(folder)


def test_a_run_killed_at_any_moment_loses_and_doubles_nothing(
    folder: Path, tmp_path: Path, quick: Cli, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # kill before, between and within batches of writing; `index/test_kill.py` kills at lines of one
    notes, moments = (500, [0, 1, 100, 200, 300] * 4) if EXHAUSTIVE else (150, [1])
    many(folder, notes)
    data_dir = tmp_path / "ragserve-data"
    dice = random.Random(7)
    held = tmp_path / HELD
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    environment = ENVIRONMENT | {"TMPDIR": str(temporary)}
    for documents in moments:
        if documents == 1:
            held.touch()
        process = start("ingest", "docs", "--json", cwd=tmp_path, command=QUICK, env=environment)
        if documents:
            wait_for_documents(data_dir, documents, process)
            time.sleep(dice.uniform(0, 0.05))
        else:
            time.sleep(dice.uniform(0.2, 1.5))
        process.kill()
        process.communicate()
        held.unlink(missing_ok=True)
        if (data_dir / "ragserve.sqlite3").exists():
            for source, chunks in contents(data_dir).items():
                assert (
                    "".join(text for text, _, _ in chunks) == Path(source).read_text()
                )  # a document is there whole or not at all
    assert list(temporary.iterdir())
    done = quick("ingest", "docs", "--json")
    assert done.returncode == 0, done.stderr
    assert list(temporary.iterdir()) == []
    report = json.loads(done.stdout)
    assert report["files"]["indexed"] + report["files"]["unchanged"] == report["files"]["total"] == notes + 2
    assert report["files"]["unchanged"] > 0
    assert report["files"]["indexed"] > 0, "it was killed before its end"
    found = contents(data_dir)
    assert len(found) == notes + 2
    for source, chunks in found.items():
        assert "".join(text for text, _, _ in chunks) == Path(source).read_text()


def test_ctrl_c_stops_cleanly_and_resume_finishes(folder: Path, tmp_path: Path, quick: Cli) -> None:
    many(folder, 150)
    (tmp_path / HELD).touch()
    process = start("ingest", "docs", "--json", cwd=tmp_path, command=QUICK)
    wait_for_documents(tmp_path / "ragserve-data", 1, process)
    process.send_signal(signal.SIGINT)
    (tmp_path / HELD).unlink()
    out, err = process.communicate(timeout=240)
    assert process.returncode == 130, err
    report = json.loads(out)
    assert report["state"] == "interrupted"
    assert 0 < report["files"]["indexed"] < 152
    done = quick("ingest", "--resume", report["job_id"], "--json")
    assert done.returncode == 0, done.stderr
    assert len(contents(tmp_path / "ragserve-data")) == 152


def test_following_changes(folder: Path, tmp_path: Path) -> None:
    process = start("ingest", "docs", "--follow-changes", "--prune", "--json", cwd=tmp_path, command=QUICK)
    assert process.stdout is not None
    try:
        assert json.loads(process.stdout.readline())["files"]["indexed"] == 2
        (folder / "seals.md").write_text("# Seals\n\nSeals sleep.\n")
        assert json.loads(process.stdout.readline())["files"]["indexed"] == 1
        (folder / "whales.md").unlink()
        assert json.loads(process.stdout.readline())["files"]["removed"] == 1
        (tmp_path / "outside").mkdir()
        (folder / "link").symlink_to(tmp_path / "outside")
        (folder / "link.md").symlink_to("/etc/hostname")
        (tmp_path / "outside" / "secret.md").write_text("# Secret\n")
        (folder / "corals.md").write_text("# Corals\n\nCorals glow.\n")  # after the links
        assert json.loads(process.stdout.readline())["files"]["indexed"] == 1
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=240)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130
    assert sorted(map(os.path.basename, contents(tmp_path / "ragserve-data"))) == [
        "corals.md",
        "otters.md",
        "seals.md",
    ]


def test_a_folder_with_nothing_to_ingest_is_not_done(folder: Path, ragserve: Cli) -> None:
    outer = folder.parent / "outer"
    outer.mkdir()
    folder.rename(outer / "docs")
    done = ragserve("ingest", "outer", "-n", "n")
    assert done.returncode == 1
    assert "only 1 folder: add --recursive" in done.stderr
    assert "nothing to do" in done.stdout
    assert "done" not in done.stdout
    done = ragserve("ingest", "outer", "-r", "--glob", "*.xyz", "-n", "n", "--json")
    assert done.returncode == 1
    assert "that match *.xyz." in done.stderr
    assert json.loads(done.stdout)["files"]["total"] == 0
    assert ragserve("ingest", "outer", "-r", "-n", "n").returncode == 0


def test_images_and_programs_in_a_folder_are_skipped_and_fail_when_named(
    folder: Path, tmp_path: Path, ragserve: Cli
) -> None:
    others = {
        "logo.png": b"\x89PNG\r\n\x1a\n" + bytes(100),
        "tool": b"\x7fELF" + bytes(100),
        "module.pyc": b"\xa7\r\r\n" + bytes(100),
        "clip.mp4": b"\0\0\0\x18ftypmp42" + bytes(100),
        "data.tar.gz": b"\x1f\x8b\x08" + bytes(100),
    }
    for name, content in others.items():
        (folder / name).write_bytes(content)
    with zipfile.ZipFile(folder / "archive.zip", "w") as archive:
        archive.writestr("inside.txt", "words")
    (folder / "about-gifs.txt").write_text("GIF89a is the name of a format.")
    done = ragserve("ingest", "docs", "--json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["files"]["indexed"], report["files"]["failed"]) == (0, 3, 0)
    skipped = {os.path.basename(each["source"]): each["reason"] for each in report["skipped"]}
    assert set(skipped) == {*others, "archive.zip"}
    assert "PNG image" in skipped["logo.png"]
    assert "6" in next(line for line in ragserve("ingest", "docs").stdout.splitlines() if "skipped" in line)
    named = ragserve("ingest", "docs/logo.png", "docs", "--json")
    assert named.returncode == 3
    assert [os.path.basename(each["source"]) for each in json.loads(named.stdout)["failures"]] == ["logo.png"]


def test_a_guessed_charset_is_in_the_report(folder: Path, ragserve: Cli) -> None:
    text = "Après l’été, le cœur de la ville s’éveille : « voilà la fête ! »\n"
    (folder / "ville.txt").write_bytes(text.encode("cp1252"))
    report = json.loads(ragserve("ingest", "docs", "--json").stdout)
    assert [each["reason"] for each in report["notes"]] == ["read as cp1252, guessed"]
    shown = json.loads(ragserve("docs", "show", "docs/ville.txt", "--json").stdout)
    assert shown["chunks"][0]["text"] == text
    (folder / "ville.txt").write_bytes(text.encode("cp1252") + b"\n")
    assert "read as cp1252, guessed" in ragserve("ingest", "docs").stdout


def test_namespaces_are_listed(folder: Path, ragserve: Cli) -> None:
    for namespace in ("sea", "lakes"):
        assert ragserve("ingest", "docs", "-n", namespace).returncode == 0
    listed = json.loads(ragserve("docs", "namespaces", "--json").stdout)
    counts = {each["name"]: (each["n_documents"], each["n_chunks"]) for each in listed}
    assert counts == {"sea": (2, 2), "lakes": (2, 2)}
    shown = ragserve("docs", "namespaces").stdout
    assert "sea: 2 documents, 2 chunks" in shown
    assert "2 namespaces" in shown


def test_links_out_of_the_folder(folder: Path, tmp_path: Path, ragserve: Cli) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.md").write_text("# Secret\n\nNot for everyone.\n")
    (folder / "link").symlink_to(outside)
    done = ragserve("ingest", "docs", "--recursive", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["files"]["indexed"], report["files"]["skipped"]) == (2, 1)
    assert [skipped["source"] for skipped in report["skipped"]] == [str(folder / "link")]
    shown = ragserve("ingest", "docs", "--recursive").stdout
    assert str(folder / "link") in shown
    assert "--follow-symlinks" in shown
    assert ragserve("ingest", "docs", "-r", "--follow-symlinks", "--json").returncode == 0
    assert str(outside / "secret.md") in contents(tmp_path / "ragserve-data")
    # a file that became a link out is gone; what the link leads to was never in the folder
    (folder / "whales.md").unlink()
    (folder / "whales.md").symlink_to(outside / "secret.md")
    pruned = json.loads(ragserve("ingest", "docs", "-r", "--prune", "--json").stdout)
    assert pruned["vanished"] == [str(folder / "whales.md")]
    assert sorted(contents(tmp_path / "ragserve-data")) == [
        str(folder / "otters.md"),
        str(outside / "secret.md"),
    ]


@pytest.fixture
def small_disk(tmp_path: Path) -> Path:
    """A folder on which a command in its own mount namespace can mount a disk of any size."""
    target = tmp_path / "small"
    target.mkdir()
    probe = subprocess.run(
        ["unshare", "-rm", "mount", "-t", "tmpfs", "none", str(target)], capture_output=True, check=False
    )
    if shutil.which("unshare") is None or probe.returncode:
        pytest.skip(f"this machine does not let us mount a small disk: {probe.stderr.decode()}")
    return target


def test_a_full_disk_stops_the_run_and_leaves_nothing_half(
    folder: Path, tmp_path: Path, small_disk: Path, quick: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The embedder is not meant here: it gets no sentences, and words so long that each is one unknown word.
    monkeypatch.setenv("RAGSERVE_SENTENCE_BYTES", "0")
    for i in range(48):
        (folder / f"book{i:02d}.txt").write_text(f"{i} {'water' * 2900} " * 2)
    ingest = ["ingest", str(folder), "--json", "--chunk-tokens", "4096", "--data-dir"]
    script = f"""
        mount -t tmpfs -o size=2200k none {small_disk}
        {" ".join((*QUICK, *ingest))} {small_disk} > {tmp_path}/first.json; echo first $?
        cp -r {small_disk} {tmp_path}/full
    """
    command = ["unshare", "-rm", "sh", "-c", script]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**ENVIRONMENT, "RAGSERVE_SENTENCE_BYTES": "0"},
        capture_output=True,
        check=False,
        timeout=200,
    )
    errors = done.stderr.decode()
    assert done.stdout.decode().split("\n")[0] == "first 1", errors
    assert "disk" in errors
    assert "Traceback" not in errors
    assert "Nothing was changed" not in errors
    full = contents(tmp_path / "full")
    assert quick(*ingest, str(tmp_path / "full")).returncode == 0, "where there is space"
    freed = contents(tmp_path / "full")
    first = json.loads((tmp_path / "first.json").read_text())
    assert (first["state"], first["files"]["indexed"], first["files"]["total"]) == ("failed", len(full), 50)
    assert "disk" in first["error"]
    assert 0 < len(full) < len(freed) == 50
    for found in (full, freed):
        for source, chunks in found.items():
            assert "".join(text for text, _, _ in chunks) == Path(source).read_text()
