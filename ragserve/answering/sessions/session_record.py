"""Sessions as JSON, which `session_store` keeps on disk: one text for a session, one for each turn."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ragserve.answering.prompt import Message
from ragserve.answering.results import RetrievedPassage
from ragserve.answering.sessions.kept_dialogue import Dialogue
from ragserve.answering.sessions.past_turns import PastTurn
from ragserve.strategy_spec import StrategySpec
from sglang_ext.wire.protocol import Span

_FIELDS = (
    *("owner", "namespace", "budget", "created_at", "used_at", "turns", "system", "exact", "outdated"),
    "namespaces_made_at",
)


class UnreadableSession(ValueError):
    """What was read is no session."""


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A session at one moment. Its turns never change, so nothing of them is copied. ``answers``: their texts
    as the user saw them."""

    id: str
    used_at: float
    fields: Mapping[str, Any]
    past: Sequence[PastTurn]
    answers: Sequence[str]

    @classmethod
    def of(cls, dialogue: Dialogue) -> SessionRecord:
        """Take down what a session is now."""
        said = dialogue.messages[len(dialogue.past[0].history) :] if dialogue.past else []
        fields = {
            **{name: getattr(dialogue, name) for name in _FIELDS},
            "named": _plain_spec(dialogue.named),
            "spec": _plain_spec(dialogue.spec),
            "keys": sorted(dialogue.keys),
        }
        answers = [message.content for message in said[1::2]]
        return cls(dialogue.id, dialogue.used_at, fields, tuple(dialogue.past), answers)

    def session_json(self) -> str:
        """All of it but the turns. Raises ValueError and TypeError for what JSON does not have."""
        return _json(self.fields)

    def turn_json(self, number: int) -> str:
        """A turn, counted from 0. Raises as `session_json`."""
        turn = self.past[number]
        return _json(
            {
                "ids": list(turn.ids),
                "asked": turn.asked,
                "spans": [[span.start, span.end] for span in turn.spans],
                "unregistered": list(turn.unregistered),
                "owners": list(turn.owners),
                "passages": [passage.model_dump() for passage in turn.passages],
                "question": turn.question,
                "history": [[message.role, message.content] for message in turn.history],
                "answer": self.answers[number],
            }
        )


def dialogue_of(name: str, session_json: str, turns_json: Iterable[str]) -> Dialogue:
    """A session as it was, without KV. Raises UnreadableSession."""
    try:
        fields = json.loads(session_json)
        if "namespaces_made_at" not in fields:  # of an earlier version
            made_at = fields.get("namespace_made_at")
            fields["namespaces_made_at"] = {} if made_at is None else {fields["namespace"]: made_at}
        dialogue = Dialogue(name, **{each: fields[each] for each in _FIELDS})
        dialogue.named, dialogue.spec = _spec(fields["named"]), _spec(fields["spec"])
        dialogue.keys = set(fields["keys"])
        for number, text in enumerate(turns_json):
            found = json.loads(text)
            turn = _turn(found)
            dialogue.past.append(turn)
            # Its prompt was perhaps another, whose KV is gone with the engine. The next turns' are these.
            dialogue.prompts.append(tuple(dialogue.past))
            if number == 0:
                dialogue.messages.extend(turn.history)
            dialogue.messages += [Message("user", turn.question), Message("assistant", found["answer"])]
        if len(dialogue.past) != (0 if dialogue.outdated else dialogue.turns):
            raise ValueError(f"{len(dialogue.past)} of {dialogue.turns} turns are there")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnreadableSession(str(error) or type(error).__name__) from error
    return dialogue


def _turn(found: Mapping[str, Any]) -> PastTurn:
    return PastTurn(
        found["ids"],
        found["asked"],
        tuple(Span(start, end) for start, end in found["spans"]),
        found["unregistered"],
        tuple(RetrievedPassage.model_validate(each) for each in found["passages"]),
        found["question"],
        tuple(Message(role, content) for role, content in found["history"]),
        owners=tuple(found.get("owners", ())),
    )


def _plain_spec(spec: StrategySpec | None) -> list[Any] | None:
    return None if spec is None else [spec.name, dict(spec.options)]


def _spec(found: Sequence[Any] | None) -> StrategySpec | None:
    return None if found is None else StrategySpec(*found)


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))  # ASCII, so that half a character is no error
