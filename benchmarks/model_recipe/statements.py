"""Questions made of statements by rule: "The bridge was built in 1909." gives "When was the bridge built?".

A subject that is a pronoun is replaced by the article's title, and words by others of the same meaning, so
that the question is not a piece of the text. Questions that do not come out well do little harm: their answer
is still in the sentence that has most of their words."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

_MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
_DATE = rf"(?:(?:{_MONTHS}) (?:\d{{1,2}}, )?\d{{4}}|\d{{1,2}} (?:{_MONTHS}) \d{{4}}|\d{{4}})"
_PLACE = r"[A-Z][\w'-]+(?:,? [A-Z][\w'-]+){0,3}"
_BE = r"was|were|is|are|had been|has been|have been"
_DONE = "[a-z]+ed|built|born|held|made|written|known|found|won|sold|sung|led|sent|shot|begun|taken|given|seen"
_SUBJECT = r"(?P<subject>(?:[A-Z][^,;:()]{2,70}?))"
IRREGULAR = {
    "became": "become", "began": "begin", "brought": "bring", "built": "build", "came": "come",
    "drew": "draw", "fell": "fall", "flew": "fly", "fought": "fight", "found": "find", "gave": "give",
    "got": "get", "grew": "grow", "held": "hold", "knew": "know", "left": "leave", "led": "lead",
    "lost": "lose", "made": "make", "met": "meet", "ran": "run", "rose": "rise", "sang": "sing", "saw": "see",
    "sent": "send", "sold": "sell", "spent": "spend", "stood": "stand", "took": "take", "taught": "teach",
    "told": "tell", "went": "go", "won": "win", "wrote": "write",
}  # fmt: skip
_PAST = rf"(?P<verb>[a-z]+ed|{'|'.join(IRREGULAR)})"
SAME = """founded/established/set up, began/started, built/constructed, wrote/authored, located/situated,
released/published/put out, movie/film, big/large, famous/well known,
bought/purchased/acquired, ended/finished, called/named, city/town, children/kids,
received/got, died/passed away, largest/biggest, leader/head, population/number of people,
won/gained, created/made, war/conflict, area/region, company/firm, band/group, battle/fight,
first/earliest, main/chief, teacher/instructor, moved to/relocated to, became/turned into,
begin/start, build/construct, write/author, become/turn into, buy/purchase, show/programme,
usually/often"""
_GROUPS = [group.split("/") for group in re.split(r",\s+", SAME)]
_OTHER = {word: [w for w in group if w != word] for group in _GROUPS for word in group}
_SAME = re.compile(rf"\b({'|'.join(sorted(map(re.escape, _OTHER), key=len, reverse=True))})\b")
_SILENT = re.compile(
    r"(?:[aiou][cgstvz]|[^aeiou][aeiou][bdklmnprt]|[rln][cgsv]|[a-z]{2}[aeiou]t|u|bl|dl|pl|tl)$"
)
_SPOKEN = re.compile(r"(?:e[nrlt]|o[nrp]|i[tn]|w|x|y|sh|ch|ow|ai[nld]|ee[dkmnp])$")
"""Ends of verbs that have and have not a silent e."""
_NO_SUBJECT = re.compile(
    r"^(?:In|On|At|By|Under|After|Before|During|From|For|With|As|If|When|While|Although|Though|Having|However"
    r"|There|This|That|These|Those|Each|Both|Some|Many|Most|Another|Other|Also|Since|Until|Despite|Its?|His|Her)\b"
    r"|\b(?:was|were|is|are|had|has|have|who|which|that|when|did|be)\b|[a-z]ed$|\d$"
)
Made = tuple[str, str]


def base(verb: str) -> str:
    """The verb after "did"."""
    if verb in IRREGULAR:
        return IRREGULAR[verb]
    stem = verb[:-2]
    if stem.endswith("i"):
        return stem + "e" if len(stem) < 4 else stem[:-1] + "y"
    if re.search(r"([bdgmnprt])\1$", stem):
        return stem[:-1]
    return stem + "e" if _SILENT.search(stem) and not _SPOKEN.search(stem) else stem


def _asked(template: str) -> Callable[[re.Match[str]], Made]:
    """Fill a template with the match's groups; ``{base}`` is the verb after "did"."""

    def made(match: re.Match[str]) -> Made:
        groups = {name: value or "" for name, value in match.groupdict().items()}
        groups["base"] = base(groups.get("verb", ""))
        groups["do"] = {"has": "does", "have": "do"}.get(groups.get("verb", ""), "did")
        groups["pronoun"] = "What" if groups.get("be") in ("is", "are") else "Who"
        return template.format(**groups), groups.get("answer") or groups["subject"]

    return made


_END = r"(?=[,;.]|$| (?:and|but|after|before|when|where|while|by|with|for|as|because|to)\b)"
_PASSIVE = rf"^{_SUBJECT} (?P<be>{_BE}) (?P<done>(?:\w+ly )?(?:{_DONE})"
_ACTIVE = rf"^{_SUBJECT} {_PAST}"
_COUNT = r"(?P<answer>\d[\d,]*|two|three|four|five|six|seven|eight|nine|ten)"
RULES = {
    _PASSIVE + rf"[^,;:()]{{0,40}}?) (?:in|on) (?P<answer>{_DATE}){_END}": "When {be} {subject} {done}?",
    _PASSIVE + rf") (?:in|at|near) (?:the )?(?P<answer>{_PLACE}){_END}": "Where {be} {subject} {done}?",
    _PASSIVE + rf"[^,;:()]{{0,40}}?) by (?:the )?(?P<answer>{_PLACE}){_END}": "Who {be} {subject} {done} by?",
    _ACTIVE + rf"(?P<rest> [^,;:()]{{4,80}}?) (?:in|on) (?P<answer>{_DATE}){_END}": (
        "When did {subject} {base}{rest}?"
    ),
    _ACTIVE + rf"(?P<rest>(?: [^,;:()]{{2,50}}?)?) (?:in|at|near) (?P<answer>{_PLACE}){_END}": (
        "Where did {subject} {base}{rest}?"
    ),
    _ACTIVE + rf" (?P<answer>(?:an?|the|his|her|its|their) [^,;:()]{{4,50}}?){_END}": (
        "What did {subject} {base}?"
    ),
    rf"^(?P<subject>{_PLACE}) {_PAST}(?P<rest> [^,;:()]{{10,90}}?){_END}": "Who {verb}{rest}?",
    rf"^(?P<subject>{_PLACE}) (?P<be>was|is|were|are) (?P<rest>(?:the|an?) [^,;:()]{{12,90}}?){_END}": (
        "{pronoun} {be} {rest}?"
    ),
    rf"^{_SUBJECT} (?P<verb>has|have|had) (?:about |over )?{_COUNT} (?P<rest>[a-z]+(?: [a-z]+)?s)\b": (
        "How many {rest} {do} {subject} have?"
    ),
    rf"(?P<subject>{_PLACE}), (?P<rest>the [^,;:()]{{8,60}}),": "Who or what is {rest}?",
}
_RULES = [(re.compile(pattern), _asked(template)) for pattern, template in RULES.items()]
_PRONOUN = re.compile(r"^(?:He|She|It|They)\b")
_OPENING = re.compile(rf"^(?:In|On|By|During|After|Since) (?:{_DATE}|the [a-z]+|[^,]{{3,30}}), (?:the |a )?")


def question_about(sentence: str, title: str, rng: random.Random) -> Made | None:
    """Return a question and its answer, a part of the sentence, or nothing where no rule fits."""
    opening = _OPENING.match(sentence)
    stated = sentence[opening.end() :] if opening else sentence
    stated = _PRONOUN.sub(lambda _: title, stated[:1].upper() + stated[1:], count=1)
    made = []
    for pattern, ask in _RULES:
        match = pattern.search(stated)
        if match and not _NO_SUBJECT.search(match["subject"]):
            made.append(ask(match))
    fitting = [(question, answer) for question, answer in made if answer in sentence]
    if not fitting:
        return None
    question, answer = rng.choice(fitting)
    question = re.sub(r"(?<=\w )(?:The|A|An|Their)(?= )", lambda m: m.group().lower(), question)
    return _reworded(question, rng), answer


def _reworded(question: str, rng: random.Random) -> str:
    """The question with half of the known words replaced."""
    return _SAME.sub(lambda m: rng.choice(_OTHER[m.group()]) if rng.random() < 0.5 else m.group(), question)
