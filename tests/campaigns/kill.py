"""kill -9 at random points of ingestion, warm-up, index save, page write and tune, and of each engine
process. Nothing acknowledged is lost, nothing is there twice, no process is left, the next start works."""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.campaigns.kill_tune import tune
from tests.campaigns.kill_warm import warm_up
from tests.campaigns.progress import Progress
from tests.campaigns.site import ENDED, Site
from tests.integration.models import small_models
from tests.integration.processes import assert_gone, family_of
from tests.unit.commands.test_ingest import contents, many, start, wait_for_documents
from tests.unit.documents.document_samples import kill_writer, whole_documents
from tests.unit.index.killed_child import child_killed_at, make_old, old_or_new

TARGET = 240
ENDS_WITHIN_S = 10.0
NOTES = 200  # files of an ingestion
KILLS_OF_A_RUN = 5  # before an ingestion is let through and compared
_LINES = 700  # of ours in a write and a save, at least
_SPACE = "killed"


def page_write(folder: Path, chance: random.Random) -> None:
    """A process that writes and removes documents' KV."""
    kill_writer(folder / "pages", chance.uniform(0, 0.08))
    whole_documents(folder / "pages")


def index_save(folder: Path, chance: random.Random) -> None:
    """A process that replaces documents and saves the index, at a line of ours."""
    data = folder / "index"
    shutil.rmtree(data, ignore_errors=True)
    make_old(data, chance.choice(("flat", "sq8", "hnsw")))
    assert child_killed_at(chance.randint(1, _LINES), data), "it ended before that line: lower _LINES"
    old_or_new(data)


def ingestion(folder: Path, chance: random.Random) -> None:
    """`ragserve ingest` of a folder: killed some times, then let through and compared with its files."""
    work = folder / "ingestion"
    killed = work / "killed"
    if not killed.exists():
        shutil.rmtree(work, ignore_errors=True)
        (work / "docs").mkdir(parents=True)
        many(work / "docs", NOTES)
        killed.write_text("")
    data = work / "ragserve-data"
    process = start("ingest", "docs", "--json", cwd=work)
    wait_for_documents(data, chance.randrange(NOTES), process)
    time.sleep(chance.uniform(0, 0.1))
    process.kill()
    process.communicate()
    _assert_whole(contents(data))
    killed.write_text(killed.read_text() + "x")
    if len(killed.read_text()) == KILLS_OF_A_RUN:
        done = start("ingest", "docs", "--json", cwd=work)
        _, said = done.communicate()
        assert done.returncode == 0, said.decode()[-2000:]
        found = contents(data)
        _assert_whole(found)
        assert len(found) == NOTES, f"{NOTES - len(found)} documents are lost"
        killed.unlink()


def _assert_whole(found: dict[str, list[tuple[str, int, int]]]) -> None:
    for source, chunks in found.items():
        assert "".join(text for text, _, _ in chunks) == Path(source).read_text(), f"{source} is not whole"


class Engine:
    """A server that ingests, warms up and answers until one of its processes is killed."""

    def __init__(self, folder: Path) -> None:
        self.site = Site(folder=folder / "engine", force_strategies="true", **small_models(folder))

    def kill(self, victim: str, chance: random.Random) -> None:
        """Kill ``victim`` (scheduler, detokenizer, main, or all of them), start again, and look."""
        site = self.site
        site.ensure_up()
        if site.documents(_SPACE):
            site.call("DELETE", f"/rag/namespaces/{_SPACE}")
        known = {f"kept {i}": f"Document {i} was there before." for i in range(8)}
        site.put(_SPACE, known)
        accepted: set[str] = set()
        busy = threading.Thread(target=_work_until_it_dies, args=(site.url, accepted), daemon=True)
        busy.start()
        time.sleep(chance.uniform(0.1, 2.0))
        family = family_of(site.running.process.pid)
        _kill(family, victim)
        began = time.monotonic()
        try:
            with contextlib.suppress(Exception):
                site.running.process.wait(ENDS_WITHIN_S)
            status, took = site.running.process.poll(), time.monotonic() - began
            assert status is not None, f"{victim} was killed, and the server still runs after {took:.0f} s"
            assert status != 0, f"{victim} was killed, and the server ended with 0"
            assert_gone(family, ENDS_WITHIN_S)
            log = site.running.log.read_text(errors="replace").lower()
            assert victim in ("main", "all") or victim in log, f"no message names the {victim}:\n{log[-800:]}"
        finally:
            busy.join(60)
            site.down()
            site.up()
        for job in site.call("GET", "/rag/jobs", params={"namespace": _SPACE})["jobs"]:
            if job["state"] not in ENDED:
                job = site.finished(job)
            assert job["state"] == "done", job
        self._assert_there({*known, *accepted})
        site.warm(_SPACE)
        site.settled()

    def _assert_there(self, known: set[str]) -> None:
        found = self.site.call("GET", "/rag/documents", params={"namespace": _SPACE, "limit": 1000})
        sources = [row["source"] for row in found["documents"]]
        assert len(sources) == len(set(sources)), f"twice: {sorted(sources)}"
        lost = known - set(sources)
        assert not lost, f"accepted, and lost: {sorted(lost)}"
        body = {"query": "Which document was there before?", "namespace": _SPACE, "k": 64}
        texts = [row["text"] for row in self.site.call("POST", "/rag/retrieve", json=body)["results"]]
        assert len(texts) == len(set(texts)) == min(64, len(sources)), "a chunk is lost or there twice"


def _work_until_it_dies(url: str, accepted: set[str]) -> None:
    """Ingest, warm up and ask; collect the names of the documents whose job was accepted."""
    with httpx.Client(base_url=url, timeout=240) as client, contextlib.suppress(httpx.HTTPError):
        for i in range(1000):
            texts = {f"new {i}/{part}": f"Text {part} of new document {i}." for part in range(4)}
            rows = [{"name": name, "text": text} for name, text in texts.items()]
            answer = client.post("/rag/ingest", json={"namespace": _SPACE, "texts": rows, "warm": True})
            if answer.status_code == httpx.codes.ACCEPTED:
                accepted.update(texts)
            body: dict[str, Any] = {"query": f"What is document {i}?", "namespace": _SPACE}
            client.post("/rag/query", json={**body, "strategy": "concat", "max_new_tokens": 8})


def _kill(family: list[psutil.Process], victim: str) -> None:
    """SGLang's processes are named sglang::scheduler and sglang::detokenizer, cut to 15 characters."""
    chosen = family if victim == "all" else family[:1]
    if victim not in ("main", "all"):
        chosen = [process for process in family if process.name().startswith(f"sglang::{victim[:5]}")]
        assert len(chosen) == 1, f"no {victim} among {[process.name() for process in family]}"
    for process in chosen:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)


PLAIN: dict[str, Callable[[Path, random.Random], None]] = {
    "page write": page_write,
    "index save": index_save,
    "ingestion": ingestion,
    "tune": tune,
    "warm-up": warm_up,
}
ORDER = (
    *("page write", "index save", "ingestion", "scheduler", "page write", "index save", "ingestion"),
    *("detokenizer", "ingestion", "main", "tune", "all", "warm-up"),
)


def run(progress: Progress, order: tuple[str, ...] = ORDER) -> None:
    """Kill in this order again and again."""
    with contextlib.ExitStack() as stack:
        engine: Engine | None = None
        while progress.goes_on():
            kind, chance = order[progress.operations % len(order)], progress.random()
            with progress.operation(kind):
                if kind in PLAIN:
                    PLAIN[kind](progress.folder, chance)
                else:
                    if engine is None:
                        engine = Engine(progress.folder)
                        stack.callback(engine.site.down)
                    engine.kill(kind, chance)
