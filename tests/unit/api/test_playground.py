"""The playground: who gets it, what it may load, and what it does in a real browser."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import httpx
import pytest

from ragserve.api.playground import FOLDER, PATHS
from tests.conftest import REPO
from tests.unit.api.browser import Page, browsing
from tests.unit.api.scripted_server import DOCUMENTS, Live, eventually, serving

KEY = "a-key"
POISON = "<img src=/poisoned onerror='window.poisoned=1'><script>window.poisoned=1</script>"


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Iterator[Live]:
    with serving(tmp_path_factory.mktemp("locked"), model_path, api_key=KEY, strategy="prefix") as live:
        live.index("docs", DOCUMENTS)
        yield live


def test_the_page_and_its_files_need_no_key_and_nothing_else_is_open(locked: Live) -> None:
    with locked.client() as client:
        page = client.get("/playground")
        assert page.status_code == 200
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        # relative: a proxy may serve it all below a path of its own
        named = {f"/{name}" for name in re.findall(r'(?:src|href)="(playground/[^"]+)"', page.text)}
        for script in FOLDER.glob("*.js"):
            imported = re.findall(r'from "\./([^"]+)"', script.read_text(encoding="utf-8"))
            named |= {f"/playground/{name}" for name in imported}
        assert named | {"/playground"} == PATHS, "every file is used, and every file that is used is there"
        for path in PATHS:
            answer = client.get(path)
            assert answer.status_code == 200, path
            policy = answer.headers["content-security-policy"].split("; ")
            assert "default-src 'self'" in policy
            assert "unsafe" not in " ".join(policy)
            assert answer.headers["x-content-type-options"] == "nosniff"
        for path in ("/playground/", "/playground/../info", "/playground/x.js", "/playground/%2e%2e/app.py"):
            request = client.build_request("GET", path)
            request.url = request.url.copy_with(raw_path=path.encode())
            assert client.send(request).status_code == 401, path


def test_the_root_leads_to_the_page_without_a_key(locked: Live) -> None:
    with locked.client() as client:
        answer = client.get("/", follow_redirects=False)
        assert (answer.status_code, answer.headers["location"]) == (307, "playground")
        assert client.get("/", follow_redirects=True).url.path == "/playground"
        assert client.head("/").status_code == 200  # Ollama's clients ask
        assert client.post("/").status_code == 405


def test_the_files_name_no_other_origin_and_parse_no_markup() -> None:
    for path in FOLDER.iterdir():
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|[\"'(]//|@import|url\(", text), path
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|setHTML|document\.write|DOMParser", text
        ), path
        assert not re.search(r"\beval\(|new Function|createContextualFragment|srcdoc|javascript:", text), path
        assert not re.search(r"<style|style=|<script(?![^>]* src=)|\son[a-z]+=", text), path


def test_the_wheel_has_the_files() -> None:
    with (REPO / "pyproject.toml").open("rb") as file:
        patterns = tomllib.load(file)["tool"]["setuptools"]["package-data"]["ragserve"]
    for path in FOLDER.iterdir():
        name = str(path.relative_to(REPO / "ragserve"))
        assert any(fnmatch(name, pattern) for pattern in patterns), name


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browsing(tmp_path_factory.mktemp("browser")) as page:
        yield page


def enter(page: Page, live: Live) -> None:
    """Open the page, with the key if it asks for one."""
    page.open(f"{live.url}/playground")
    page.until("!main.hidden || !login.hidden")
    if page.evaluate("main.hidden"):
        page.evaluate("document.getElementById('key').focus()")
        page.type(KEY)
        page.press("Enter", 13)
        page.until("!main.hidden")


def ask(page: Page, question: str) -> None:
    """Ask by keyboard and wait for the answer, which is exact here."""
    turns = page.evaluate("document.querySelectorAll('.turn').length")
    page.evaluate("document.getElementById('question').focus()")
    page.type(question)
    page.press("Enter", 13)
    page.until(f"document.querySelectorAll('.turn').length === {turns + 1}")
    page.until("document.querySelector('.comparison').textContent.includes('Answered exactly')")


def focused(page: Page) -> str:
    return str(page.evaluate("document.activeElement.id || document.activeElement.textContent"))


@pytest.mark.browser
def test_a_visit(page: Page, locked: Live, tmp_path: Path) -> None:
    pictures = Path(os.environ.get("SCREENSHOTS", tmp_path))
    page.look(width=1200, height=1000, scheme="light")
    page.open(f"{locked.url}/playground")

    # The key, by keyboard alone: a wrong one, then the right one.
    page.until("!document.getElementById('login').hidden")
    for key, then in (("wrong", "document.getElementById('refused').textContent"), (KEY, "!main.hidden")):
        page.evaluate("document.getElementById('key').select()")
        page.type(key)
        page.press("Enter", 13)
        page.until(then)
    assert page.evaluate("sessionStorage.getItem('ragserve-key')") == KEY
    assert page.evaluate("localStorage.length") == 0
    page.complaints.clear()  # the browser's own lines about answers with status 401

    # A document into a new namespace, and its progress.
    poisoned = tmp_path / "<b>poison.txt"
    text = f"{POISON} The lighthouse of Skerryvore was built by Alan Stevenson. 𝒯wo million people came."
    poisoned.write_text(text, encoding="utf-8")
    page.evaluate("document.getElementById('namespace').focus()")
    page.press("End", 35)  # the last choice: a new one
    page.until("document.getElementById('new-namespace').offsetParent")
    page.evaluate("document.getElementById('new-namespace').focus()")
    page.type("lights")
    page.choose_files("#files", [poisoned])
    page.until("document.querySelector('#jobs li')?.textContent.includes('indexed')")
    page.until("document.getElementById('namespace').value === 'lights'")
    assert page.evaluate("document.querySelector('progress').position") == 1

    # The question: one answer, as nothing is composed here.
    locked.engine.deltas = (POISON, " Alan", " Stevenson", " [1]", ".")
    ask(page, "Who built the lighthouse of Skerryvore?")
    titles = "[...document.querySelectorAll('article h3')].map((one) => one.textContent)"
    assert page.evaluate(titles) == ["Exact (prefix)"]
    answers = page.evaluate("[...document.querySelectorAll('.text')].map((one) => one.textContent)")
    assert answers == [f"{POISON} Alan Stevenson [1]."]
    shown = page.evaluate("document.getElementById('dialogue').textContent")
    for part in (
        "Document tokens by tier",
        "computed",
        "Stages",
        "search",
        "decode",
        "first token",
        "Strategy prefix",
    ):
        assert part in shown, part
    page.screenshot(pictures / "playground-light.png")

    # The citation at its place, by keyboard; Escape leads back.
    page.evaluate("document.querySelector('.cite').focus()")
    page.press("Enter", 13)
    page.until("document.querySelector('dialog[open] mark')")
    assert page.evaluate("document.querySelector('mark').textContent") == text
    assert focused(page) == text
    page.screenshot(pictures / "playground-source.png")
    page.press("Escape", 27)
    page.until("!document.querySelector('dialog[open]')")
    assert focused(page) == "[1]"

    # Other colours, and a phone: nothing is wider than the window.
    page.look(width=360, height=800, scheme="dark")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.screenshot(pictures / "playground-phone-dark.png")

    # The poison stayed text, and everything came from the server.
    assert page.evaluate(
        "window.poisoned === undefined && !document.querySelector('main img, main script, dialog img')"
    )
    assert page.complaints == []
    assert all(url.startswith(locked.url) for url in page.urls), page.urls
    assert not any("poisoned" in url for url in page.urls)


@pytest.mark.browser
def test_every_control_is_reached_with_the_tab_key(page: Page, locked: Live) -> None:
    enter(page, locked)
    page.evaluate("document.getElementById('namespace').focus()")
    reached = []
    for _ in range(13):
        reached.append(focused(page))
        page.press("Tab", 9)
    wanted = ["namespace", "files", "question", "", "k", "also", "send"]
    assert [one for one in reached if one in wanted][: len(wanted)] == wanted, reached


@pytest.mark.browser
def test_stages_add_up_to_the_total(page: Page, locked: Live) -> None:
    enter(page, locked)
    exact = {"embed_ms": 5, "search_ms": 2, "prompt_ms": 1, "queue_ms": 4, "prefill_ms": 40, "ttft_ms": 60}
    composed = exact | {"rewrite_ms": 1, "load_ms": 3, "compose_ms": 10, "recompute_ms": 20}
    composed |= {"documents_ms": 2}
    wanted: list[tuple[dict[str, Any], dict[str, float]]] = [
        (exact, {"queue": 4, "prefill": 40, "other": 8, "decode": 40}),
        (
            composed,
            {
                "documents": 2,
                "queue": 1,
                "load": 3,
                "compose": 10,
                "recompute": 20,
                "prefill": 10,
                "other": 5,
                "decode": 40,
            },
        ),
    ]
    for timings, parts in wanted:
        given = json.dumps(timings | {"total_ms": 100})
        shown = page.evaluate(f"import('/playground/answer.js').then((answer) => answer.stages({given}))")
        found = {name: value for name, value, _ in shown}
        assert found.items() >= parts.items(), found
        assert sum(found.values()) == 100


@pytest.mark.browser
def test_times_and_cost_are_compared(page: Page, locked: Live) -> None:
    enter(page, locked)
    answers = [
        json.dumps(
            {
                "timings": {"ttft_ms": ttft},
                "context": {"strategy": name, "tokens_recomputed": computed, "tokens_kept": kept},
            }
        )
        for name, ttft, computed, kept in (("prefix", 200, 5000, 5000), ("samkv", 50, 100, 750))
    ]
    compared = f"import('/playground/answer.js').then((answer) => answer.comparison({', '.join(answers)}))"
    assert page.evaluate(compared) == (
        "Composed (samkv): first token 50 ms, 4.0 times sooner than exact (200 ms); document tokens "
        "computed 100 and 5,000, kept in KV 750 and 5,000."
    )


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Iterator[Live]:
    """A server that keeps questions and ratings, without a key."""
    folder = tmp_path_factory.mktemp("kept")
    with serving(folder, model_path, feedback_bytes=2**20, query_log_bytes=2**20) as live:
        live.index("docs", DOCUMENTS)
        yield live


@pytest.mark.browser
def test_a_dialogue_goes_on_until_another_begins(page: Page, kept: Live) -> None:
    page.open(f"{kept.url}/playground")
    page.until("!main.hidden")
    ask(page, "Who built the lighthouse of Skerryvore?")
    asked = len(kept.engine.requests)
    ask(page, "And when was it lit?")
    prompts = kept.services.answerer._prompts
    said = [prompts.words(request.input_ids) for request in kept.engine.requests[asked:]]
    assert all("Alan Stevenson" in prompt.split("And when was it lit?")[0] for prompt in said[-1:]), said
    page.evaluate("document.getElementById('anew').click()")
    assert page.evaluate("document.querySelectorAll('.turn').length") == 0
    kept.engine.requests.clear()
    ask(page, "And when was it lit?")
    assert "Who built" not in prompts.words(kept.engine.requests[-1].input_ids)


@pytest.mark.browser
def test_what_no_passage_supports_is_marked(page: Page, kept: Live) -> None:
    page.open(f"{kept.url}/playground")
    page.until("!main.hidden")
    kept.engine.deltas = ("Alan Stevenson built it.", " The ticket costs 17 dollars.")
    ask(page, "Who built the lighthouse of Skerryvore?")
    kept.engine.reset()
    assert page.evaluate("document.querySelector('.text').textContent") == (
        "Alan Stevenson built it. [1] The ticket costs 17 dollars. (no source)"
    )
    assert page.evaluate("document.querySelector('.unsupported').textContent").startswith("The ticket")


@pytest.mark.browser
def test_an_answer_is_copied_and_rated(page: Page, kept: Live) -> None:
    page.open(f"{kept.url}/playground")
    page.until("!main.hidden")
    page.evaluate(
        "navigator.clipboard.writeText = (text) => { window.copied = text; return Promise.resolve(); }"
    )
    ask(page, "Who built the lighthouse of Skerryvore?")
    for label, says in (("Copy", "Copied."), ("Good answer", "Thank you.")):
        button = (
            f"[...document.querySelectorAll('article button')].find((one) => one.textContent === '{label}')"
        )
        page.evaluate(f"{button}.click()")
        page.until(f"document.querySelector('article [role=status]').textContent === '{says}'")
    assert page.evaluate("window.copied") == "Alan Stevenson [1]."
    rows = kept.settings.data_dir / "feedback" / "feedback.jsonl"
    eventually(lambda: rows.exists() and '"rating":"up"' in rows.read_text(), "it is kept")


@pytest.mark.browser
def test_a_question_is_asked_in_other_namespaces_too(page: Page, kept: Live) -> None:
    kept.index("handbook", {"glass": "The lighthouse of glass was built by nobody."})
    page.open(f"{kept.url}/playground")
    page.until("!main.hidden")
    page.evaluate("also.value = 'hand*'")
    ask(page, "Who built the lighthouse of glass?")
    assert "handbook" in kept.engine.requests[-1].namespace.split("+")
    page.evaluate("document.querySelector('article button[aria-label^=Source]').click()")
    page.until("document.getElementById('source-place').textContent.includes(', ')")
    page.evaluate("document.getElementById('close').click(); also.value = ''")


@pytest.mark.browser
def test_a_namespace_is_looked_after(page: Page, kept: Live) -> None:
    kept.index("care", DOCUMENTS)
    page.open(f"{kept.url}/playground")
    page.until("!main.hidden")
    page.evaluate(
        "(() => { const one = document.getElementById('namespace'); one.value = 'care'; "
        "one.dispatchEvent(new Event('change')); })()"
    )
    page.evaluate("document.querySelector('#listing summary').click()")
    page.until("document.querySelectorAll('#documents li').length === 3")
    assert "indexed" in page.evaluate("document.querySelector('#documents li small').textContent")
    remove = "document.querySelector('#documents li button[aria-label^=Delete]')"
    name = page.evaluate(f"{remove}.ariaLabel").removeprefix("Delete ")
    page.evaluate(f"{remove}.click()")
    page.until(f"{remove}.textContent === 'Delete for good?'")
    assert kept.services.store.namespace("care").n_documents == 3, "one press removes nothing"
    page.evaluate(f"{remove}.click()")
    page.until(f"document.getElementById('listed').textContent === 'Deleted {name}.'")
    assert kept.services.store.namespace("care").n_documents == 2

    page.evaluate("document.querySelector('#own summary').click()")
    page.until("!document.querySelector('#settings fieldset').disabled")
    page.evaluate("document.getElementById('set-k').value = '2'")
    page.evaluate("document.getElementById('set-retrieval').value = 'lexical'")
    page.evaluate("document.getElementById('settings').requestSubmit()")
    page.until("document.getElementById('saved').textContent === 'Saved.'")
    assert kept.services.store.settings("care") == {"k": 2, "retrieval": "lexical"}

    httpx.post(
        f"{kept.url}/rag/query", json={"query": "What does it cost?", "namespace": "care", "min_score": 2}
    ).raise_for_status()
    eventually((kept.settings.data_dir / "unanswered" / "unanswered.jsonl").exists, "it is listed")
    page.evaluate("document.querySelector('#not-found summary').click()")
    page.until("document.querySelector('#questions li')?.textContent.includes('What does it cost?')")


@pytest.mark.browser
def test_a_failure_says_what_happened(page: Page, locked: Live) -> None:
    enter(page, locked)
    locked.engine.reset()
    locked.engine.error = RuntimeError("secret detail")
    page.evaluate("document.querySelector('[name=mode][value=prefix]').click()")
    page.evaluate("document.getElementById('question').focus()")
    page.type("Who built it?")
    page.press("Enter", 13)
    page.until("document.querySelector('.answers [role=alert]')")
    said = page.evaluate("document.querySelector('.answers [role=alert]').textContent")
    assert "went wrong" in said
    assert "secret" not in said
    locked.engine.reset()


@pytest.mark.browser
def test_axe_core_finds_nothing(page: Page, locked: Live) -> None:
    enter(page, locked)
    ask(page, "Who built the lighthouse of Skerryvore?")
    for scheme, width, opened in (("light", 1200, False), ("dark", 360, False), ("dark", 360, True)):
        page.look(width=width, height=800, scheme=scheme)
        if opened:
            page.evaluate("document.querySelector('.cite').click()")
            page.until("document.querySelector('dialog[open] mark')")
        assert page.violations() == [], (scheme, width, opened)


@pytest.mark.browser
def test_passages_are_corrected_and_a_file_is_previewed(page: Page, kept: Live, tmp_path: Path) -> None:
    pictures = Path(os.environ.get("SCREENSHOTS", tmp_path))
    kept.index("correct", {"skerryvore": POISON + DOCUMENTS["skerryvore"]})
    page.open(f"{kept.url}/playground")
    page.until("!main.hidden")
    page.evaluate(
        "(() => { const one = document.getElementById('namespace'); one.value = 'correct'; "
        "one.dispatchEvent(new Event('change')); })()"
    )
    page.evaluate("document.querySelector('#listing summary').click()")
    page.until("document.querySelector('#documents li button')")
    page.evaluate("document.querySelector('#documents li button[aria-label^=Passages]').click()")
    line = "document.querySelector('#chunks[open] li')"
    page.until(line)
    assert POISON in page.evaluate(f"{line}.querySelector('.text').textContent")

    def press(name: str) -> None:
        page.evaluate(f"{line}.querySelector('button[aria-label^={name}]').click()")

    press("Edit")
    page.evaluate(f"{line}.querySelector('textarea').value = 'It was lit in 1844.'")
    press("Save")
    page.until(f"{line}.querySelector('small').textContent.includes('edited')")
    (document,) = kept.services.store.documents("correct")
    (chunk,) = kept.services.store.document_chunks("correct", document.doc_id)
    assert (chunk.text, chunk.edited) == ("It was lit in 1844.", True)
    page.screenshot(pictures / "playground-passages.png")
    press("Disable")
    page.until("document.getElementById('chunks-said').textContent.includes('in no search')")
    assert kept.services.store.document_chunks("correct", document.doc_id) == []
    press("Enable")
    page.until("document.getElementById('chunks-said').textContent.includes('searched as shown')")
    change = httpx.get(f"{kept.url}/rag/documents/{document.doc_id}/chunks/0?namespace=correct").json()
    httpx.patch(
        f"{kept.url}/rag/documents/{document.doc_id}/chunks/0?namespace=correct",
        json={"version": change["version"], "text": "Somebody else was here."},
    ).raise_for_status()
    page.complaints.clear()
    press("Restore")
    page.until("document.getElementById('chunks-said').textContent.includes('changed meanwhile')")
    page.evaluate("document.getElementById('chunks-close').click()")

    page.complaints.clear()  # the browser's own line about the answer with status 409
    file = tmp_path / "notes.md"
    file.write_text(f"# Notes\n\n{POISON}\n\n" + "The lamp is trimmed every four hours. " * 60)
    page.choose_files("#preview-file", [file])
    page.until("document.querySelectorAll('#chunks[open] li').length > 1")
    assert "tokens, at most 256 each" in page.evaluate("document.getElementById('chunks-said').textContent")
    assert len(kept.services.store.documents("correct")) == 1
    page.screenshot(pictures / "playground-preview.png")
    page.look(width=360, height=800, scheme="dark")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.evaluate("window.poisoned === undefined && !document.querySelector('dialog img')")
    assert page.complaints == []
