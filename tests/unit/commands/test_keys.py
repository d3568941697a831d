"""`ragserve keys`, as a user types it, and what commands leave in the audit log."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from ragserve.commands import docs, keys
from ragserve.errors import InvalidRequest, StorageFull
from ragserve.profiles import gate
from ragserve_index import IndexStore
from ragserve_index.types import Document, NewChunk, NewDocument


def run(module: Any, *arguments: str) -> Any:
    app = typer.Typer()
    module.register(app)
    app.command("other")(lambda: None)
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done


def audited(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "audit" / "audit.jsonl").read_text().splitlines()]


def test_a_key_is_made_listed_and_revoked(tmp_path: Path) -> None:
    data = ("--data-dir", str(tmp_path))
    made = run(
        keys, "keys", "create", "acme-app", "--right", "read", "--right", "ingest", "-n", "acme",
        "-n", "acme-*", "--expires", "90d", "--requests-per-minute", "1200",
        "--tokens-per-minute", "50000", "--max-k", "10", *data,
    )  # fmt: skip
    secret = made.stdout.strip()
    assert secret.startswith("rsk-")
    listed = run(keys, "keys", "list", *data).stdout
    assert secret not in listed
    assert "acme-app: ingest, read; namespaces acme, acme-*; 1,200 requests a minute; " in listed
    assert "50,000 tokens a minute; k up to 10" in listed
    (key,) = json.loads(run(keys, "keys", "list", "--json", *data).stdout)
    assert key["rights"] == ["ingest", "read"]
    assert "digest" not in key
    assert f"revoked {key['key_id']} acme-app" in run(keys, "keys", "revoke", key["key_id"], *data).stdout
    assert "0 keys" in run(keys, "keys", "list", *data).stdout
    created, revoked = audited(tmp_path)
    assert (created["what"], created["name"], created["result"]) == (
        "ragserve keys create",
        "acme-app",
        "created",
    )
    assert created["who"].startswith("user ")
    assert (revoked["what"], revoked["key_id"]) == ("ragserve keys revoke", key["key_id"])
    assert secret not in json.dumps([created, revoked])


def test_when_a_key_expires_is_shown_in_utc(tmp_path: Path) -> None:
    data = ("--data-dir", str(tmp_path))
    expires = "2999-12-31T10:00+02:00"
    made = run(keys, "keys", "create", "x", "--right", "read", "-n", "n", "--expires", expires, *data)
    assert "expires 2999-12-31 08:00 UTC" in made.stderr
    assert "expires 2999-12-31 08:00 UTC" in run(keys, "keys", "list", *data).stdout
    file = tmp_path / "keys.json"  # as an older version wrote it
    older = file.read_text().replace("2999-12-31T08:00:00Z", "2999-12-31T10:00:00+02:00")
    assert older != file.read_text()
    file.write_text(older)
    assert "expires 2999-12-31 10:00 +02:00" in run(keys, "keys", "list", *data).stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--right", "write"], "no right 'write'"),
        (["--right", "read", "--expires", "soon"], "neither a number of days nor a date"),
        (["--right", "read", "--expires", "9999-12-31T23:00-05:00"], "neither a number of days nor a date"),
        (["--right", "admin", "-n", "acme"], "without namespaces"),
        (["--right", "admin", "--label", "hr"], "without labels"),
        (["--right", "read", "--label", "a b"], "labels"),
        (["--right", "read", "--labels-header", "a b"], "labels_header"),
    ],
)
def test_what_makes_no_key_is_refused(tmp_path: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        run(keys, "keys", "create", "x", *arguments, "--data-dir", str(tmp_path))
    assert not (tmp_path / "keys.json").exists()


def test_labels_of_keys(tmp_path: Path) -> None:
    data = ("--data-dir", str(tmp_path))
    read = ("--right", "read", "-n", "acme", *data)
    run(keys, "keys", "create", "anna", "--label", "legal", "--label", "hr", *read)
    run(keys, "keys", "create", "portal", "--labels-header", "X-User-Labels", *read)
    listed = run(keys, "keys", "list", *data).stdout
    assert "anna: read; namespaces acme; labels hr, legal" in listed
    assert "portal: read; namespaces acme; labels *; of them those in the header X-User-Labels" in listed
    changed = run(keys, "keys", "label", "anna", "--add", "board", "--remove", "hr", *data).stdout
    assert changed.endswith("labels board, legal\n")
    assert audited(tmp_path)[-1]["labels"] == ["board", "legal"]
    with pytest.raises(InvalidRequest, match="what to change"):
        run(keys, "keys", "label", "anna", *data)
    for wrong in ("a b", "a,b", ""):
        with pytest.raises(InvalidRequest, match="labels"):
            run(keys, "keys", "label", "anna", "--add", wrong, *data)


def test_labels_of_documents(tmp_path: Path) -> None:
    data = ("-n", "acme", "--data-dir", str(tmp_path))
    with IndexStore(tmp_path) as store:
        store.ensure_namespace("acme", embedder="words", dim=4)
        document = NewDocument("a.txt", "A", "1", "text/plain", 4, {})
        vectors = np.eye(1, 4, dtype=np.float32)
        (stored,) = store.replace_documents("acme", [(document, [NewChunk("text", 0, 4, 1)], vectors)])
    said = run(docs, "docs", "label", "a.txt", "--add", "hr", "--add", "board", *data).stdout
    assert said == f"{stored.doc_id} a.txt: labels board, hr\n"
    assert "labels board, hr" in run(docs, "docs", "ls", *data).stdout
    assert run(docs, "docs", "label", stored.doc_id, "--remove", "hr", *data).stdout.endswith(
        "labels board\n"
    )
    assert "every key sees it" in run(docs, "docs", "label", "a.txt", "--only", "", *data).stdout
    assert [one["documents"] for one in audited(tmp_path)] == [
        {stored.doc_id: labels} for labels in (["board", "hr"], ["board"], [])
    ]
    with pytest.raises(InvalidRequest, match="what to change"):
        run(docs, "docs", "label", "a.txt", *data)
    with pytest.raises(InvalidRequest, match="no label"):
        run(docs, "docs", "label", "a.txt", "--add", "a b", *data)


def test_removals_by_command_are_audited(tmp_path: Path) -> None:
    with IndexStore(tmp_path) as store:
        store.ensure_namespace("acme", embedder="words", dim=4)
        chunk = NewChunk("text", 0, 4, 1)
        document = NewDocument("a.txt", "A", "1", "text/plain", 4, {})
        (stored,) = store.replace_documents("acme", [(document, [chunk], np.eye(1, 4, dtype=np.float32))])
    run(docs, "docs", "rm", "a.txt", "-n", "acme", "--data-dir", str(tmp_path))
    run(docs, "docs", "drop", "acme", "--data-dir", str(tmp_path))
    told = [(one["what"], one["namespace"], one["documents"]) for one in audited(tmp_path)]
    assert told == [("ragserve docs rm", "acme", [stored.doc_id]), ("ragserve docs drop", "acme", 0)]


def test_removals_before_one_that_fails_are_audited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with IndexStore(tmp_path) as store:
        store.ensure_namespace("acme", embedder="words", dim=4)
        given: Any = [
            (NewDocument(name, name, "1", "text/plain", 4, {}), [], np.empty((0, 4))) for name in "abc"
        ]
        first = store.replace_documents("acme", given)[0].doc_id
    remove = IndexStore.remove_document

    def full(store: IndexStore, namespace: str, doc_id: str) -> Document:
        if doc_id != first:
            raise StorageFull("The disk is full.")
        return remove(store, namespace, doc_id)

    monkeypatch.setattr(IndexStore, "remove_document", full)
    with pytest.raises(StorageFull):
        run(docs, "docs", "rm", "a", "b", "c", "-n", "acme", "--data-dir", str(tmp_path))
    (told,) = audited(tmp_path)
    assert told["documents"] == [first]


def test_a_namespace_is_dropped_though_its_verdicts_cannot_be_removed(tmp_path: Path) -> None:
    with IndexStore(tmp_path) as store:
        store.ensure_namespace("acme", embedder="words", dim=4)
    (tmp_path / gate.FILE_NAME).write_text("[]")
    command = ["docs", "drop", "acme", "--data-dir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "ragserve.cli", *command], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "dropped acme (0 documents, 0 chunks)\n")
    assert done.stderr.startswith("What was measured in acme, which was dropped, is left on disk: ")


def test_a_folder_that_cannot_be_written_is_named_with_what_to_do() -> None:
    command = ["keys", "create", "app", "--right", "admin", "--data-dir", "/sys/ragserve"]
    done = subprocess.run(
        [sys.executable, "-m", "ragserve.cli", *command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: /sys/ragserve")
    assert "use another --data-dir" in done.stderr
    assert "Traceback" not in done.stderr
