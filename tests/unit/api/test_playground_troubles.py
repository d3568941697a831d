"""The playground in a real browser where something goes another way: a name like markup, a double click, a
server that is gone, a key that no longer counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ragserve.engine.base import GenerateRequest
from ragserve.engine.ports import hold_port, port_of
from ragserve.profiles import gate
from tests.unit.api.browser import Page, browsing
from tests.unit.api.oidc_provider import CLIENT, SECRET, oidc_provider
from tests.unit.api.scripted_server import DOCUMENTS, Live, Tenants, eventually, serving

pytestmark = pytest.mark.browser
# Markup, a terminal's escape, and letters that turn what follows them.
NAME = "<img src=/poisoned onerror=window.poisoned=1>\u202etxt.\x1b[31mred/" + "long" * 60
FIGURES = gate.Figures(
    n=352,
    f1=None,
    f1_vs_full=None,
    kl=None,
    kept=25.0,
    recomputed=25.0,
    score=60.4,
    score_vs_full=1.2,
    references=352,
    margin=4.8,
    ttft_ms=171.0,
    full_ttft_ms=642.0,
)
WORSE = replace(FIGURES, score=40.0, score_vs_full=-19.2, margin=25.0, ttft_ms=60.0)
IDLE = "document.getElementById('stop').hidden"  # nothing is being answered


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browsing(tmp_path_factory.mktemp("browser")) as page:
        yield page


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("troubles")
    with serving(folder, model_path, feedback_bytes=2**20, query_log_bytes=2**20) as live:
        live.index("docs", DOCUMENTS)
        live.index("names", {NAME: f"{NAME} was built by Alan Stevenson. עברית \u202e"})
        live.index("many", {f"notes/{i:03}": f"Note {i} is about lamps." for i in range(60)})
        yield live


def enter(page: Page, live: Live, namespace: str) -> None:
    page.open(f"{live.url}/playground")
    page.until("!main.hidden")
    choose(page, namespace)


def choose(page: Page, namespace: str) -> None:
    page.evaluate(
        f"(() => {{ const one = document.getElementById('namespace'); one.value = {namespace!r}; "
        "one.dispatchEvent(new Event('change')); })()"
    )


def unfold(page: Page, part: str) -> None:
    page.evaluate(f"document.querySelector('#{part} summary').click()")


def ask(page: Page, question: str) -> None:
    page.evaluate("document.getElementById('question').focus()")
    page.type(question)
    page.press("Enter", 13)


def text_of(page: Page, selector: str) -> str:
    return str(page.evaluate(f"document.querySelector({selector!r}).textContent"))


def record(live: Live) -> None:
    """Record two strategies of namespace docs, as `ragserve tune` does."""
    where = ("scripted", "2026-11-29", "a CPU", "float32")
    entries = {
        label: gate.Entry({gate.set_of("docs"): figures}, *where)
        for label, figures in (("passages:by=score,count=5", FIGURES), ("epic:first=8", WORSE))
    }
    gate.record(live.settings.data_dir / gate.FILE_NAME, live.engine.info.fingerprint, entries)


def test_names_and_texts_are_shown_as_they_are(page: Page, live: Live) -> None:
    page.look(width=360, height=800, scheme="light")
    enter(page, live, "names")
    unfold(page, "listing")
    page.until("document.querySelector('#documents bdi')")
    (document,) = live.services.store.documents("names")
    assert text_of(page, "#documents bdi") == document.title
    page.evaluate("document.querySelector('#documents li button[aria-label^=Passages]').click()")
    page.until("document.querySelector('#chunks[open] li .text')")
    assert NAME in text_of(page, "#chunks-list .text")
    page.press("Escape", 27)
    ask(page, "Who built it?")
    page.until("document.querySelector('.sources button')")
    page.evaluate("document.querySelector('.sources button').click()")
    page.until("document.querySelector('#source[open] mark')")
    assert NAME in text_of(page, "mark")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.evaluate("window.poisoned === undefined && !document.querySelector('main img, dialog img')")
    assert not any("poisoned" in url for url in page.urls)
    assert page.complaints == []


def test_only_a_second_press_deletes(page: Page, live: Live) -> None:
    live.index("gone", DOCUMENTS)
    page.look(width=1000, height=900, scheme="light")
    enter(page, live, "gone")
    unfold(page, "listing")
    page.until("document.querySelectorAll('#documents li').length === 3")
    remove = "document.querySelector('#documents li button[aria-label^=Delete]')"
    place = page.evaluate(
        f"(() => {{ const box = {remove}.getBoundingClientRect(); return [box.x, box.y]; }})()"
    )
    x, y = (each + 8 for each in place)
    for clicks in (1, 2):
        for kind in ("mousePressed", "mouseReleased"):
            page.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=clicks)
    page.until(f"{remove}.textContent === 'Delete for good?'")
    assert live.services.store.namespace("gone").n_documents == 3, "a double click is one press"
    page.press("Tab", 9)
    page.until(f"{remove}.textContent === 'Delete'")
    page.evaluate(f"{remove}.focus()")
    page.press("Enter", 13)
    page.until(f"{remove}.textContent === 'Delete for good?'")
    page.press("Enter", 13)
    page.until("document.getElementById('listed').textContent.startsWith('Deleted')")
    assert live.services.store.namespace("gone").n_documents == 2
    assert page.evaluate("document.activeElement.textContent") == "Passages", "the keyboard goes on there"


def test_a_long_list_is_read_page_by_page_and_narrowed(page: Page, live: Live) -> None:
    enter(page, live, "many")
    unfold(page, "listing")
    lines = "document.querySelectorAll('#documents li').length"
    page.until(f"{lines} === 50")
    page.evaluate("document.getElementById('more').click(); document.getElementById('more').click()")
    page.until(f"{lines} === 60 && document.getElementById('more').hidden")
    page.evaluate("document.getElementById('begins').focus()")
    page.type("notes/01")
    page.until(f"{lines} === 10")
    choose(page, "docs")
    page.until(f"{lines} === 3")
    assert page.evaluate("document.getElementById('begins').value") == ""


def test_a_job_that_ends_leaves_the_choice_of_namespace(page: Page, live: Live, tmp_path: Path) -> None:
    enter(page, live, "docs")
    unfold(page, "listing")
    page.until("document.querySelectorAll('#documents li').length === 3")
    lamp = tmp_path / "lamp.txt"
    lamp.write_text("The lamp burns oil.")
    page.choose_files("#files", [lamp])
    choose(page, "many")
    page.until("document.querySelector('.job').textContent.includes('docs: done')")
    page.until("document.querySelector('#namespace [value=docs]').textContent === 'docs (4 documents)'")
    assert page.evaluate("document.getElementById('namespace').value") == "many"
    choose(page, "docs")
    page.until("document.querySelectorAll('#documents li').length === 4")


def test_settings_of_one_namespace_do_not_reach_another(page: Page, live: Live) -> None:
    live.services.store.set_settings("docs", {"k": 3, "system": "Be brief."})
    enter(page, live, "docs")
    unfold(page, "own")
    field = "document.getElementById('set-k').value"
    page.until(f"{field} === '3'")
    choose(page, "many")
    page.until("!document.querySelector('#settings fieldset').disabled")
    assert page.evaluate(field) == ""
    assert page.evaluate("document.getElementById('set-system').value") == ""
    choose(page, "")  # a new one, which has none yet
    page.until("document.getElementById('saved').className === 'error'")
    assert page.evaluate("document.querySelector('#settings fieldset').disabled")
    live.services.store.set_settings("docs", {})
    page.complaints.clear()  # the browser's own line about the answer with status 404


def test_the_map_shows_what_is_measured(page: Page, live: Live) -> None:
    enter(page, live, "docs")
    unfold(page, "measured")
    page.until(
        "document.getElementById('measured-said').textContent.includes('ragserve tune --namespace docs')"
    )
    record(live)
    choose(page, "many")
    choose(page, "docs")
    page.until("document.querySelectorAll('#map tbody tr').length === 3")
    rows = page.evaluate("[...document.querySelectorAll('#map tbody tr')].map((row) => row.textContent)")
    assert rows == [
        "1epic:first=840.0-19.225.060 ms25.0 %25.0 %352not verified",
        "2passages:by=score,count=560.4+1.24.8171 ms25.0 %25.0 %352verified",
        "3full59.2642 ms100.0 %100.0 %352exact",
    ]
    assert page.evaluate("document.querySelectorAll('#map circle').length") == 3
    (live.settings.data_dir / gate.FILE_NAME).unlink()


@pytest.mark.parametrize(("width", "scheme"), [(1200, "dark"), (360, "light")])
def test_axe_core_finds_nothing_in_what_unfolds(page: Page, live: Live, width: int, scheme: str) -> None:
    record(live)
    page.look(width=width, height=900, scheme=scheme)
    enter(page, live, "docs")
    for part in ("listing", "own", "measured", "not-found"):
        unfold(page, part)
    page.until("document.querySelector('#documents li') && document.querySelector('#map svg')")
    page.until("!document.querySelector('#settings fieldset').disabled")
    ask(page, "Who built the lighthouse of Skerryvore?")
    page.until("document.querySelector('.sources button')")
    assert page.violations() == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.evaluate("document.querySelector('#documents button[aria-label^=Passages]').click()")
    page.until("document.querySelector('#chunks[open] li')")
    page.evaluate("document.querySelector('#chunks li button').click()")
    assert page.violations() == []
    page.evaluate("document.querySelector('#chunks textarea').value += ' More.'")
    page.press("Escape", 27)
    assert page.evaluate("document.getElementById('chunks').open"), "no slip throws an edit away"
    page.evaluate("document.querySelector('#chunks button[aria-label^=Cancel]').click()")
    page.press("Escape", 27)
    page.until("!document.getElementById('chunks').open")
    (live.settings.data_dir / gate.FILE_NAME).unlink()


def test_a_server_that_is_gone_is_told_and_the_question_kept(
    page: Page, tmp_path: Path, model_path: Path
) -> None:
    with serving(tmp_path, model_path) as live:
        live.index("docs", DOCUMENTS)
        enter(page, live, "docs")
    ask(page, "Who built it?")
    page.until("document.querySelector('.answers [role=alert]')?.textContent.includes('cannot be reached')")
    page.until("document.getElementById('question').value === 'Who built it?'")
    assert page.evaluate("document.getElementById('stop').hidden")
    page.complaints.clear()


@pytest.mark.parametrize(("mode", "then"), [("prefix", "many"), ("both", "docs"), ("both", "many")])
def test_what_a_left_dialogue_was_answered_reaches_no_other(
    page: Page, live: Live, mode: str, then: str
) -> None:
    """``then``: the namespace of the next question; for the same one the user begins a new dialogue."""
    enter(page, live, "docs")
    page.evaluate("""(real => { window.fetch = (url, all) => real(url, all?.body?.replace
        ? {...all, body: all.body.replace('"auto"', '"epic","strategy_options":{"force":true}')}
        : all); })(window.fetch)""")  # nothing is measured here: auto would be exact
    page.evaluate(f"document.querySelector('[name=mode][value={mode}]').click()")
    wanted = ["epic", "prefix"] if mode == "both" else ["prefix"]
    engine = live.engine
    engine.requests.clear()

    def hold(request: GenerateRequest) -> None:
        if request.strategy == "prefix":
            engine.hold.clear()

    engine.reply = hold
    ask(page, "Who built the lighthouse of Skerryvore?")
    page.until(f"document.querySelectorAll('article .text').length === {len(wanted)}")
    page.until("[...document.querySelectorAll('article .text')].at(-1).textContent")
    assert [request.strategy for request in engine.requests] == wanted
    if then == "docs":
        page.evaluate("anew.click()")
    else:
        choose(page, then)
    eventually(lambda: not engine.running, "the answer is stopped")
    engine.reset()
    assert page.evaluate(f"{IDLE} && anew.hidden && question.value === ''")
    ask(page, "And when was it lit?")
    page.until(f"document.querySelector('.turn') && {IDLE} && !anew.hidden")
    said = [live.services.answerer._prompts.words(request.input_ids) for request in engine.requests]
    assert said
    assert not [prompt for prompt in said if "Who built" in prompt]


def test_a_server_that_takes_no_earlier_messages_is_sent_none(
    page: Page, tmp_path: Path, model_path: Path
) -> None:
    with serving(tmp_path, model_path, max_history_messages=0) as live:
        live.index("docs", DOCUMENTS)
        enter(page, live, "docs")
        for number in (1, 2):
            ask(page, f"Who built lighthouse {number}?")
            page.until(f"document.querySelectorAll('.turn').length === {number} && {IDLE}")
            assert page.evaluate("document.querySelector('.turn [role=alert]')?.textContent") is None
    assert page.complaints == []


def test_a_key_that_no_longer_counts_is_asked_for_again(page: Page, live: Live) -> None:
    keys = Tenants(live).keys
    keys.create("others", ["many"], ["read"])
    _, secret = keys.create("reader", ["docs"], ["read"])
    page.open(f"{live.url}/playground")
    page.evaluate("sessionStorage.clear()")
    page.open(f"{live.url}/playground")
    page.until("!document.getElementById('login').hidden")
    page.evaluate("document.getElementById('key').focus()")
    page.type(secret)
    page.press("Enter", 13)
    page.until("!main.hidden")
    options = "[...document.getElementById('namespace').options].map((one) => one.value)"
    assert page.evaluate(options) == ["docs", ""], "it learns of no other namespace"
    # The last request of the page by itself is answered: none is refused before the question's.
    page.until("performance.getEntriesByType('resource').some((one) => one.name.includes('state=running'))")
    keys.revoke("reader")
    with live.client(headers={"Authorization": f"Bearer {secret}"}) as client:
        eventually(lambda: client.get("/info").status_code == 401, "it is revoked")
    # A second request is refused, too, before the server has said whether it has single sign-on.
    page.evaluate("""(real => { window.asked = 0; window.fetch = (...all) => {
        if (!String(all[0]).endsWith('/session')) return real(...all);
        asked += 1;
        return new Promise((go) => { window.go = go; }).then(() => real(...all));
    }; })(window.fetch)""")
    ask(page, "Who built it?")
    page.until("document.getElementById('question').value === 'Who built it?'")
    page.evaluate("import('/playground/api.js').then((api) => api.get('/info')).catch(() => go())")
    assert page.evaluate("asked") == 1, "the key is asked for once"
    page.until("document.getElementById('refused').textContent.includes('no longer counts')")
    page.until("document.activeElement.id === 'key'")
    page.complaints.clear()


def test_somebody_signs_in_and_out(page: Page, tmp_path: Path, model_path: Path) -> None:
    page.evaluate("sessionStorage.clear()")
    with oidc_provider() as provider, hold_port() as listener:
        url = f"http://127.0.0.1:{port_of(listener)}"
        settings = {
            "oidc_issuer": provider.issuer,
            "oidc_client_id": CLIENT,
            "oidc_client_secret": SECRET,
            "oidc_public_url": url,
            "oidc_groups": {
                "staff": {"namespaces": ["docs"], "rights": ["read", "ingest"], "labels": ["board"]}
            },
        }
        with serving(tmp_path, model_path, listener=listener, **settings) as live:
            live.index("docs", DOCUMENTS)
            live.index("payroll", DOCUMENTS)
            bell = live.services.store.documents("docs")[0]
            live.services.store.set_labels("docs", [bell.doc_id], only=["board"])
            page.open(f"{url}/playground")
            page.until("!document.getElementById('sign-in').hidden")
            page.evaluate("document.querySelector('#sign-in a').click()")
            page.until("document.getElementById('user')?.textContent === 'Signed in as ada.'")
            page.until("!main.hidden")
            assert page.evaluate("location.href") == f"{url}/playground", "no code stays in the address"
            options = "[...document.getElementById('namespace').options].map((one) => one.value)"
            assert page.evaluate(options) == ["docs", ""]
            unfold(page, "listing")
            page.until("document.querySelectorAll('#documents li').length === 3")
            assert "for board" in text_of(page, "#documents")
            page.evaluate("document.querySelector('#documents li button[aria-label^=Delete]').focus()")
            for _ in range(2):
                page.press("Enter", 13)
            page.until("document.getElementById('listed').className === 'error'")
            assert live.services.store.namespace("docs").n_documents == 3
            page.complaints.clear()  # the browser's own line about the answer with status 403
            ask(page, "Who built the lighthouse of Skerryvore?")
            page.until("document.querySelector('.sources button')")
            page.evaluate("document.getElementById('sign-out').click()")
            page.until(f"location.href.startsWith('{provider.issuer}/bye')")
            page.open(f"{url}/playground")
            page.until("!document.getElementById('sign-in').hidden")
            assert page.evaluate("main.hidden")
            page.complaints.clear()
