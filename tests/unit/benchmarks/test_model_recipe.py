"""The recipe of the embedded model: what training data may hold, what a token may attend to, how a model
grows."""

from __future__ import annotations

import gzip
import json
import math
import random
import zlib
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from benchmarks.model_recipe import architecture, attention, facts, prepare, sources, squad_parts
from benchmarks.model_recipe.architecture import Shape, grown, init_params
from benchmarks.model_recipe.corpus import MODEL, Corpus
from benchmarks.model_recipe.export import logits
from benchmarks.model_recipe.forward import taught_loss
from benchmarks.model_recipe.heldout import right
from benchmarks.model_recipe.long_prompts import long_documents, question_set
from benchmarks.model_recipe.optimizer import Muon
from benchmarks.model_recipe.overlap import Evaluated, report
from benchmarks.model_recipe.question_forms import as_typed, typo
from benchmarks.model_recipe.samples import PROMPT, REPLY, Tokens, packed
from benchmarks.model_recipe.statements import question_about
from benchmarks.model_recipe.synthetic import Synthetic

SMALL = {"vocab_size": 97, "hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 2}
NO_NAMES: dict[str, list[str]] = {"first": [], "last": [], "place": []}


def profile(name: str) -> str:
    values = {
        "Geography": {
            "Location": {"text": "Middle Europe, beside the sea"},
            "Area": {"total": {"text": "1,234 sq km"}},
            "Coastline": {"text": "56 km"},
        },
        "Government": {
            "Country name": {"conventional short form": {"text": name}},
            "Capital": {"name": {"text": "Strelsau"}},
            "National symbol(s)": {"text": "red lion"},
            "Independence": {"text": "5 May 1855 (from Utopia)"},
            "Internet country code": {"text": ".rt"},
        },
    }
    return json.dumps(values)


def test_no_profile_of_a_corpus_country_is_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "2020" / "europe"
    folder.mkdir(parents=True)
    for name in ("Ruritania", "Germany", "Portugal"):
        (folder / f"{name}.json").write_text(profile(name), encoding="utf-8")
    monkeypatch.setattr(prepare, "some_of", lambda lines, rng: lines)
    monkeypatch.setattr(prepare, "WRITERS", {"txt": prepare.WRITERS["txt"]})  # the quickest to parse
    rows = list(prepare.profiles(tmp_path, Evaluated([])))
    assert [row[1] for row in rows] == ["Ruritania"]
    answers = {key: answer for _, key, answer in rows[0][4]}
    assert answers["Capital - name"] == "Strelsau"
    assert answers["Independence"] == "5 May 1855"
    assert all(answer in rows[0][3][at] for at, _, answer in rows[0][4])


def test_questions_and_runs_of_words_of_a_set_are_found() -> None:
    text = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
    evaluated = Evaluated([("set", [{"question": "Who wrote it?", "ctxs": [{"text": text}]}])])
    assert evaluated.asked("who wrote it") == "set"
    assert evaluated.asked("Who read it?") is None
    assert evaluated.repeats(f"Before. {text.title()}, and after.")
    assert not evaluated.repeats(" ".join(text.split()[:12]) + " and after")


def test_every_file_of_a_part_is_checked(tmp_path: Path) -> None:
    run = "one two three four five six seven eight nine ten eleven twelve thirteen"
    for name in ("articles-1", "articles-2"):
        prepare.pack(tmp_path, name, [["Title", run]])
    found = report(tmp_path, Evaluated([("set", [{"text": run}])]))
    assert found["articles"] == {
        "questions": 0, "in a set": 0, "texts": 2, "with a common run": 2, "sets": {"set": 2},
    }  # fmt: skip


def test_hidden_documents_see_only_themselves() -> None:
    # two samples; the first has a head, two documents and a question, the second is visible
    sample = torch.tensor([0] * 6 + [1] * 2)
    segment = torch.tensor([0, 1, 1, 2, -1, -1, -1, -1])
    rows = [[int(i) for i in torch.nonzero(row)[:, 0]] for row in attention.mask(sample, segment)]
    assert rows == [
        [0],
        [1],
        [1, 2],
        [3],
        [0, 1, 2, 3, 4],
        [0, 1, 2, 3, 4, 5],
        [6],
        [6, 7],
    ]


def test_questions_of_their_own_see_the_documents_but_not_each_other() -> None:
    sample = torch.zeros(6, dtype=torch.int32)
    # a head, a hidden document, and two questions of two tokens
    first, second = attention.BRANCH, attention.BRANCH + 1
    segment = torch.tensor([0, 1, first, first, second, second])
    rows = [[int(i) for i in torch.nonzero(row)[:, 0]] for row in attention.mask(sample, segment)]
    assert rows == [[0], [1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 4], [0, 1, 4, 5]]


def test_the_blocks_for_the_gpu_cover_what_is_visible() -> None:
    sample = torch.tensor([0] * 300 + [1] * 20 + [2] * 448 + [3] * 896, dtype=torch.int32)
    plain = torch.full_like(sample, attention.SEEN)
    hidden, asked = plain.clone(), plain.clone()
    hidden[320:700], hidden[900:1300] = 0, 1  # a document of its own, all through a block
    asked[1500:1560], asked[1560:] = attention.BRANCH, attention.BRANCH + 1
    n = len(sample) // attention.BLOCK
    for segment, least in ((plain, 15), (hidden, 1), (asked, 10)):
        visible = attention.Visible(sample, segment)
        attention.prepare_flex(visible)
        seen = attention.mask(sample, segment).view(n, attention.BLOCK, n, attention.BLOCK)
        listed = visible.blocks.to_dense()[0, 0].bool()
        assert not (seen.any(3).any(1) & ~listed).any()
        whole = torch.zeros_like(listed)
        for row, count in enumerate(visible.blocks.full_kv_num_blocks[0, 0].tolist()):
            whole[row, visible.blocks.full_kv_indices[0, 0, row, :count].long()] = True
        assert whole.sum() >= least
        assert not (whole & ~seen.all(3).all(1)).any()


def test_a_grown_model_computes_what_the_shallower_one_does() -> None:
    small, large = Shape(num_hidden_layers=2, **SMALL), Shape(num_hidden_layers=3, **SMALL)
    old, new = init_params(small, "cpu", 1), init_params(large, "cpu", 2)
    grown(new, old, 2, 3)
    ids = [5, 17, 2, 88, 40]
    torch.testing.assert_close(logits(new, large, ids), logits(old, small, ids))


def test_a_typing_error_changes_one_word() -> None:
    question = "Which mountain is the highest of Ruritania?"
    for seed in range(50):
        changed = [
            (a, b)
            for a, b in zip(question.split(), typo(question, random.Random(seed)).split(), strict=True)
            if a != b
        ]
        assert len(changed) <= 1, changed  # exchanging two equal letters changes nothing
    forms = {as_typed(question, random.Random(seed)) for seed in range(50)}
    assert {question, question.upper(), question.lower(), question.lower().rstrip("?")} <= forms


def test_a_profile_in_another_style_keeps_its_values() -> None:
    lines = ["Area - total: 1,234 sq km", "Capital - name: Strelsau", "- Coastline: 56 km (note: short)"]
    seen = set()
    for seed in range(60):
        restyled = facts.style(random.Random(seed))("\n".join(lines)).split("\n")
        values = [line.split(": ", 1)[1] for line in lines]
        assert all(new.endswith(value) for new, value in zip(restyled, values, strict=True)), restyled
        seen.add(restyled[0].removesuffix(values[0]))
    assert len(seen) > 20
    assert any(label.endswith("otal : ") for label in seen)
    assert any(label.islower() for label in seen)


def test_two_hop_answers_are_in_the_document_about_the_middle() -> None:
    tasks = Synthetic(1, NO_NAMES)
    for _ in range(20):
        made = tasks.hop(3, 0, 6, hint=1.0)
        texts = " ".join(text for _, text in made.docs)
        assert made.qas
        assert all(answer in texts for _, answer in made.qas)


def sample_of(classes: list[int], taught: bool) -> Tokens:
    n = len(classes)
    ids = torch.arange(n).numpy().astype("uint16")
    segments = torch.full((n,), -1).numpy().astype("int16")
    return Tokens(
        ids, torch.tensor(classes).numpy().astype("uint8"), segments, torch.arange(n).numpy(), taught
    )


def test_an_answer_is_right_if_all_its_tokens_are() -> None:
    classes = [PROMPT, PROMPT, REPLY, REPLY, PROMPT, REPLY, REPLY, REPLY]
    batch = packed(lambda room: sample_of(classes, True), 16, random.Random(1))
    target, reply = torch.tensor(batch.target), torch.tensor(batch.reply)
    assert int(reply.sum()) == 8  # of the 10 answer tokens
    assert bool(batch.taught.all())
    assert right(batch, target).all()
    wrong = target.clone()
    wrong[torch.nonzero(reply)[0]] += 1
    assert int((~right(batch, wrong)).sum()) == 1
    other = target.clone()
    other[~reply] += 1
    assert right(batch, other).all()


def test_a_teacher_counts_where_it_is_taught_and_right() -> None:
    generator = torch.Generator().manual_seed(0)
    h, embedding = torch.randn(4, 8, generator=generator), torch.randn(5, 8, generator=generator)
    target, weight = torch.tensor([0, 1, 2, 3]), torch.ones(4)
    reply = torch.tensor([False, True, True, False])
    taught = torch.tensor([True, True, True, False])
    teacher = torch.zeros(4, 5)
    teacher[torch.arange(4), torch.tensor([4, 1, 0, 0])] = 3.0  # wrong on the answer token at 2

    def loss(own: torch.Tensor) -> float:
        return float(taught_loss(h, torch.ones(8), embedding, target, weight, taught, reply, own)[0])

    before = loss(teacher)
    for place, counts in enumerate((True, True, False, False)):
        changed = teacher.clone()
        changed[place] += torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0])
        assert math.isclose(loss(changed), before, abs_tol=1e-6) != counts


def test_trained_weights_decay_to_themselves() -> None:
    for towards_start, expected in ((True, 2.0), (False, 1.0)):
        matrix = torch.full((2, 2), 2.0, requires_grad=True)
        muon = Muon([matrix], weight_decay=0.5, towards_start=towards_start)
        matrix.grad = torch.zeros(2, 2)
        muon.step(1.0, 0.9)
        torch.testing.assert_close(matrix.detach(), torch.full((2, 2), expected))


def test_what_is_held_out_is_not_trained_on() -> None:
    rows = [["squad", "", f"Passage {i} of many", []] for i in range(400)]
    left, kept = prepare.split("reading", rows, lambda row: row[2])
    assert 0 < len(left) < 40
    assert sorted(map(str, left + kept)) == sorted(map(str, rows))
    assert left == prepare.split("reading", reversed(rows), lambda row: row[2])[0][::-1]


def test_a_training_starts_from_the_grown_model(tmp_path: Path) -> None:
    small, large = Shape(num_hidden_layers=2, **SMALL), Shape(num_hidden_layers=3, **SMALL)
    old = init_params(small, "cpu", 1)
    architecture.save(old, small, tmp_path)
    start = architecture.started(tmp_path, large, "cpu")
    read = architecture.load(tmp_path)
    torch.testing.assert_close(logits(start, large, [5, 17, 2]), logits(read, small, [5, 17, 2]))


def test_a_training_of_new_layers_leaves_the_others_as_they_are(tmp_path: Path) -> None:
    small, large = Shape(num_hidden_layers=2, **SMALL), Shape(num_hidden_layers=3, **SMALL)
    architecture.save(init_params(small, "cpu", 1), small, tmp_path)
    params = architecture.started(tmp_path, large, "cpu")
    trained = architecture.lacking(params, tmp_path, large)
    assert {name.split(".")[2] for name in trained} == {"1"}  # spread between the old ones, 0 and 2
    assert trained.keys() == {name for name, value in params.items() if value.requires_grad}


def test_typed_questions_come_with_their_passage(tmp_path: Path) -> None:
    row = {
        "question": "who built the ark",
        "ctxs": [{"title": "Ark", "text": "The ark was built  by Noah, the son of Lamech."}],
        "nq_annotated_gold": {"short_answers": ["Noah, the son of Lamech", "Noah"]},
    }
    path = tmp_path / "nq.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
        file.write(json.dumps({**row, "nq_annotated_gold": {"short_answers": ["Shem"]}}) + "\n")
    text = "The ark was built by Noah, the son of Lamech."
    assert list(sources.nq_oracle(path)) == [
        sources.Reading("nq", "Ark", text, [("who built the ark", "Noah")])
    ]


@pytest.mark.parametrize(
    ("sentence", "question", "answer"),
    [
        ("The bridge was repaired in 1909.", "When was the bridge repaired?", "1909"),
        ("She studied law in Padua.", "Where did Anna Bo study law?", "Padua"),
        ("It has 12 rooms.", "How many rooms does Anna Bo have?", "12"),
    ],
)
def test_statements_become_questions(sentence: str, question: str, answer: str) -> None:
    assert (question, answer) in [question_about(sentence, "Anna Bo", random.Random(i)) for i in range(8)]


def test_nothing_is_asked_about_what_no_rule_fits() -> None:
    assert question_about("However, this is so.", "Anna Bo", random.Random(1)) is None


def test_a_question_finds_the_passage_with_its_answer_in_place() -> None:
    filler = [f"Text {i} on another matter, number {i}." for i in range(30)]
    texts = ["The old king lived in Gora until 1450.", "The old king went to Gora.", *filler]
    passages = squad_parts.Passages(texts)
    assert passages.find("Where did the old king live until 1450 ?", "Gora", 5) == 0
    assert passages.find("Where did the old king live until 1450 ?", "Gora", 30) is None
    assert passages.find("Who painted a blue horse ?", "Gora", 5) is None
    assert squad_parts.as_written("Gora 's king", "It was Gora's King.") == "Gora's King"


@pytest.fixture
def little_corpus() -> Corpus:
    """A corpus of a tokenizer, no real names and one sentence to put between facts."""
    corpus = Corpus.__new__(Corpus)
    corpus.tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    corpus.names, corpus.sentences = NO_NAMES, ["The bridge over the river was closed for repairs in spring."]
    return corpus


@pytest.mark.parametrize("tokens", [700, 5000, 20_011])
def test_long_prompts_hold_what_is_asked_and_fit(little_corpus: Corpus, tokens: int) -> None:
    docs, ids, asked = long_documents(little_corpus, Synthetic(tokens, NO_NAMES), tokens)
    sizes = list(map(len, little_corpus.encode_all([f"{title}\n{text}\n" for title, text in docs])))
    assert sizes == list(map(len, ids))
    assert tokens / 2 < sum(sizes) + len(sizes) <= tokens
    text = "\n".join(body for _, body in docs)
    assert all(answer in text for pairs in asked.values() for _, answer in pairs)


def test_names_of_long_question_sets_are_kept_from_training(little_corpus: Corpus) -> None:
    for kind in ("onehop", "crossdoc"):
        rows = question_set(little_corpus, kind, 3000, 4, seed=5)
        assert len({row["question"] for row in rows}) == 4
        assert rows == question_set(little_corpus, kind, 3000, 4, seed=5)
    kept, trained = Synthetic(1, NO_NAMES, evaluated=True), Synthetic(1, NO_NAMES)
    people = [{names.name("person") for _ in range(300)} for names in (kept, trained)]
    assert not people[0] & people[1]
    assert all(zlib.crc32(name.encode()) % 16 == 0 for name in people[0])
