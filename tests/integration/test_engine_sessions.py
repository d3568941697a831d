"""Sessions on the real engine, with forced retraction, strict memory checks, chunks and pages: exact
strategies and everything recomputed say the same, whatever is evicted; what is held is not computed again.
"""

from __future__ import annotations

import contextlib
import time
from functools import partial
from typing import Any

import httpx
import pytest

from ragserve.answering.prompt import PromptBuilder, PromptDocument
from sglang_ext.protocol import session_key
from tests.integration.engines import PARALLEL_PAGE, STRESS_CHUNK, Server
from tests.integration.prompts import rows
from tests.integration.reference import Reference

PAGE = 16
ROWS = rows("onehop")[:2]
TURNS = (  # documents and question of each turn; the second brings one again, the third none
    (ROWS[0]["docs"][:2], ROWS[0]["question"]),
    ([*ROWS[0]["docs"][1:2], *ROWS[1]["docs"][:1]], ROWS[1]["question"]),
    ((), "Which of these did you name first?"),
)
ALL = {"strategy": "concat", "strategy_options": {"recompute": "all", "force": True}}
SENTENCES = {
    "strategy": "concat",
    "strategy_options": {"recompute": "sentences", "share": 0.3, "force": True},
}


class Talk:
    """A session in a namespace of its own."""

    def __init__(self, server: Server, space: str, **fields: Any) -> None:
        self.server, self.space, self.fields = server, space, fields
        self.name = "new"

    def turn(self, number: int) -> dict[str, Any]:
        response = self.server.client.post("/rag/query", json=self.body(number))
        assert response.status_code == httpx.codes.OK, response.text
        answer = dict(response.json())
        self.name = answer["session"]["id"]
        return answer

    def body(self, number: int) -> dict[str, Any]:
        texts, question = TURNS[number]
        documents = [{"title": title, "text": text} for title, text in texts]
        fields = self.fields if number == 0 else {}
        body = {"query": question, "namespace": self.space, "documents": documents, "max_new_tokens": 8}
        return body | fields | {"session": self.name}

    def turns(self) -> int:
        """The session's turns so far."""
        sessions = self.server.client.get("/rag/sessions").json()["sessions"]
        return next(int(each["turns"]) for each in sessions if each["id"] == self.name)

    def forget(self) -> None:
        """Drop the session's KV, on the device and the host."""
        control(self.server, "remove_session", key=session_key(self.space, self.name))

    def end(self) -> None:
        assert self.server.client.delete(f"/rag/sessions/{self.name}").status_code == httpx.codes.OK


def control(server: Server, operation: str, **arguments: Any) -> dict[str, Any]:
    answer = server.client.post("/dumper/ragserve", json={"op": operation, **arguments})
    assert answer.status_code == httpx.codes.OK, answer.text
    return dict(answer.json()[0])


def on_host_of(server: Server) -> int:
    """Entries of the host tier: documents, and turns of sessions."""
    return int(control(server, "stat")["host"]["documents"])


def settled(server: Server) -> None:
    """Nothing is locked or held, and every slot and page is counted once."""
    deadline = time.monotonic() + 240
    while control(server, "stat")["device"]["locked_tokens"] or control(server, "slots")["now"]:
        assert time.monotonic() < deadline, "a slot is lost"
        time.sleep(0.02)
    control(server, "check")


@pytest.fixture(scope="module")
def wanted(stress_server: Server) -> list[dict[str, Any]]:
    """The answers of `full`: every turn is prefilled whole."""
    talk = Talk(stress_server, "sessions-full", strategy="full")
    answers = [talk.turn(number) for number in range(len(TURNS))]
    assert [answer["session"]["tokens_held"] for answer in answers] == [0, 0, 0]
    assert [answer["session"]["documents_added"] for answer in answers] == [2, 1, 0]
    assert all(answer["answer"] for answer in answers)
    talk.end()
    return answers


def test_full_says_what_transformers_says_of_the_whole_dialogue(
    stress_server: Server, wanted: list[dict[str, Any]]
) -> None:
    builder, reference = PromptBuilder.load(str(stress_server.model)), Reference(stress_server.model)
    ids: list[int] = []
    said: list[tuple[str, str]] = []
    for (texts, question), answer in zip(TURNS, wanted, strict=True):
        new = [each for each in map(tuple, texts) if each not in said]
        documents = [PromptDocument("", title, text) for title, text in new]
        lay_out = partial(builder.follow_up, ids) if ids else builder.build
        prompt = lay_out(question, documents, max_prompt_tokens=10**6)
        assert answer["usage"]["prompt"] == len(prompt.input_ids)
        found = reference.plain(prompt.input_ids, answer["usage"]["completion"]).ids
        text = builder.tokenizer.decode(found, skip_special_tokens=True)
        assert text.strip() == answer["answer"]
        ids, said = [*prompt.input_ids, *builder.answer_ids(found, text)], [*said, *new]


@pytest.mark.parametrize(
    ("strategy", "evicted"), [("prefix", ""), ("all", ""), ("all", "lost"), ("all", "host")], ids=str
)
def test_every_turn_says_what_full_prefill_says(
    stress_server: Server, wanted: list[dict[str, Any]], strategy: str, evicted: str
) -> None:
    talk = Talk(
        stress_server,
        f"sessions-{strategy}-{evicted}",
        **(ALL if strategy == "all" else {"strategy": strategy}),
    )
    for number, right in enumerate(wanted):
        if number and evicted == "lost":
            talk.forget()
        elif number and evicted:
            on_host = on_host_of(stress_server)
            control(stress_server, "evict", tiers=["sessions"])
            assert on_host_of(stress_server) > on_host
        got = talk.turn(number)
        assert got["answer"] == right["answer"]
        assert got["usage"]["prompt"] == right["usage"]["prompt"]
        assert got["context"]["notes"] == []
        session, before = got["session"], wanted[number - 1]["session"]["tokens"] if number else 0
        assert session["tokens"] == right["session"]["tokens"]
        if number:  # composed turns that were evicted have been composed again, without the answer
            least = before - PAGE - (8 + 2 if evicted == "lost" else 1)
            assert session["tokens_held"] > least
            assert got["usage"]["cached"] >= session["tokens_held"]
            assert got["context"]["tokens_by_tier"]["session"] == session["tokens_held"]
            if evicted == "host":  # brought back, not composed again
                assert session["tokens_computed"] <= PAGE + 8
    on_host = on_host_of(stress_server)
    talk.end()
    settled(stress_server)
    assert (on_host_of(stress_server) < on_host) == (evicted == "host"), "its pages went with the session"


def test_a_turn_reads_its_new_documents_from_the_cache(stress_server: Server) -> None:
    talk = Talk(stress_server, "sessions-reuse", **SENTENCES)
    first, second = talk.turn(0), talk.turn(1)
    context, session = second["context"], second["session"]
    assert first["session"]["turn"] == 1
    assert session["tokens_computed"] <= PAGE + 8
    assert context["tokens_by_tier"]["device"] == context["tokens_kept"] == context["tokens_retrieved"]
    assert 0 < context["tokens_recomputed"] < 0.4 * context["tokens_kept"]
    # evicted in between: composed as it was, and so the third turn says the same
    third = talk.turn(2)
    talk.end()
    again = Talk(stress_server, "sessions-reuse", **SENTENCES)
    again.turn(0)
    again.turn(1)
    again.forget()
    control(stress_server, "evict", tiers=["device"])
    repeated = again.turn(2)
    assert repeated["answer"] == third["answer"]
    assert repeated["session"]["tokens_held"] > STRESS_CHUNK
    again.end()
    settled(stress_server)


def test_a_shortened_dialogue_is_computed_as_the_text_that_it_is(stress_server: Server) -> None:
    """Exact strategies and everything recomputed say the same over it, with and without its KV. Without it,
    words choose what stays; with it, so does attention."""
    answers, budget = {}, 40
    for name, fields in {"full": {"strategy": "full"}, "prefix": {"strategy": "prefix"}, "all": ALL}.items():
        talk = Talk(stress_server, f"sessions-short-{name}", **fields, session_budget=budget)
        talk.turn(0)
        talk.turn(1)
        talk.forget()
        answers[name] = talk.turn(2)
        talk.end()
    full = answers["full"]
    first, last = full["session"]["earlier"]
    assert first["tokens"] > budget >= first["tokens_kept"] > 0
    assert last["tokens_kept"] == last["tokens"]
    assert first["rule"] == "words"
    for name, got in answers.items():
        assert got["answer"] == full["answer"], name
        assert got["session"]["earlier"] == full["session"]["earlier"]
        assert got["usage"]["prompt"] == full["usage"]["prompt"]
        assert got["context"]["notes"] == [], name
    # the last turn's document is composed again, behind the text that is left
    talk = Talk(stress_server, "sessions-short-reuse", **SENTENCES, session_budget=budget)
    for number in range(len(TURNS)):
        short = talk.turn(number)
    held = short["session"]["earlier"][0]
    assert (held["rule"], held["tokens"]) == ("attention", first["tokens"])
    assert budget >= held["tokens_kept"] > 0
    assert short["session"]["tokens_held"] > held["tokens_kept"]
    assert short["context"]["notes"] == []
    talk.end()
    settled(stress_server)


@pytest.mark.parametrize("fields", [SENTENCES, {"strategy": "prefix"}], ids=["composed", "prefix"])
def test_a_client_that_leaves_in_a_later_turn_leaves_nothing_behind(
    stress_server: Server, fields: dict[str, Any]
) -> None:
    talk = Talk(stress_server, "sessions-left", **fields)
    talk.turn(0)
    with contextlib.suppress(httpx.ReadTimeout):
        stress_server.client.post("/rag/query", json=talk.body(1) | {"max_new_tokens": 400}, timeout=0.3)
    with stress_server.client.stream(
        "POST", "/rag/query", json=talk.body(1) | {"max_new_tokens": 400, "stream": True}
    ) as events:
        next(events.iter_bytes())
    settled(stress_server)
    turns = talk.turns()  # one more, if an answer ended before its client had left
    assert talk.turn(1)["session"]["turn"] == turns + 1
    talk.end()
    settled(stress_server)


@pytest.mark.parametrize("stage", ["admission", "question", "recompute", "forward"])
def test_a_stage_that_fails_in_a_later_turn_takes_nothing_with_it(stress_server: Server, stage: str) -> None:
    talk = Talk(stress_server, "sessions-faults", **SENTENCES)
    talk.turn(0)
    control(stress_server, "fault", stage=stage)
    failed = stress_server.client.post("/rag/query", json=talk.body(1))
    assert failed.status_code == httpx.codes.BAD_GATEWAY, failed.text
    assert stage in failed.json()["error"]["message"]
    assert control(stress_server, "fault") == {"withdrawn": []}
    settled(stress_server)
    session = talk.turn(1)["session"]
    assert session["turn"] == 2
    assert session["tokens_computed"] <= PAGE + 8, "the first turn is still there"
    talk.end()


def test_with_two_ranks(parallel_server: Server) -> None:
    answers = {}
    for name, fields in {"full": {"strategy": "full"}, "all": ALL}.items():
        talk = Talk(parallel_server, f"sessions-ranks-{name}", **fields)
        answers[name] = [talk.turn(number) for number in range(len(TURNS))]
        talk.end()
    assert [a["answer"] for a in answers["all"]] == [a["answer"] for a in answers["full"]]
    held = [a["session"]["tokens_held"] for a in answers["all"]]
    before = [0, *(a["session"]["tokens"] for a in answers["all"])]
    assert all(now > then - PARALLEL_PAGE - 1 for now, then in zip(held, before, strict=False))
