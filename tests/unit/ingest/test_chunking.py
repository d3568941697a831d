"""Chunks are exact, lossless and within the limit, whatever the text."""

from __future__ import annotations

from itertools import pairwise

import pytest
import regex
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ragserve.ingest.chunking import Chunker
from ragserve.ingest.tokenizer import Counter, TokenizerSource
from ragserve_index.types import NewChunk

PIECES = st.one_of(
    st.text(max_size=40),
    st.text(alphabet=st.characters(min_codepoint=0x1F300, max_codepoint=0x1FAFF), max_size=30),
    st.text(alphabet="日本語中文한국어", max_size=60),
    st.sampled_from(
        [
            "\r\n",
            "\n\n",
            "\n",
            "\r",
            "\t",
            " ",
            ". ",
            "! ",
            "e\u0301",
            "\u200d",
            "<|bos|>",
            "✄",
            "\ufeff",
            "\x85",
            "\u2028",
        ]
    ),
    st.builds(
        lambda char, n: char * n,
        st.sampled_from(["a", "é", "🙂", " ", "\n", "0", "-", "\r\n"]),
        st.integers(1, 300),
    ),
    st.sampled_from(
        [
            "The quick brown fox jumps over the lazy dog. ",
            "def f(x):\n    return x\n",
            "pneumonoultramicroscopicsilicovolcanoconiosis",
        ]
    ),
)
TEXTS = st.lists(PIECES, max_size=25).map("".join)


@pytest.fixture(scope="session")
def chunkers(count: Counter) -> dict[int, Chunker]:
    return {limit: Chunker(count, limit) for limit in (16, 64, 256)}


def check(text: str, chunks: list[NewChunk], limit: int, count: Counter) -> None:
    assert "".join(chunk.text for chunk in chunks) == text
    assert all(text[chunk.start : chunk.end] == chunk.text for chunk in chunks)
    assert all(chunk.n_tokens == count(chunk.text) <= limit for chunk in chunks)
    assert all(chunks)


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(text=TEXTS, limit=st.sampled_from([16, 64, 256]))
def test_chunks_are_exact_and_lossless(
    text: str, limit: int, chunkers: dict[int, Chunker], count: Counter
) -> None:
    chunks = chunkers[limit].split(text)
    if not text.strip():
        assert chunks == []
        return
    check(text, chunks, limit, count)


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(pages=st.lists(TEXTS.filter(str.strip), min_size=1, max_size=5))
def test_chunks_stay_within_their_page(
    pages: list[str], chunkers: dict[int, Chunker], count: Counter
) -> None:
    text = "".join(pages)
    starts = [(sum(len(page) for page in pages[:i]), 10 + i) for i in range(len(pages))]
    chunks = chunkers[64].split(text, starts)
    check(text, chunks, 64, count)
    for i, page in enumerate(pages):
        assert "".join(chunk.text for chunk in chunks if chunk.page == 10 + i) == page


@pytest.mark.parametrize(
    "text",
    [
        "a" * 20_000,
        "é🙂" * 4000,
        "日本語テキスト" * 2000,
        "x\r\n" * 3000,
        " " * 900 + "b" + "\n" * 900,
        "word " * 8000,
        "A" * 250_000,
    ],
    ids=["one-word", "emoji", "no-spaces", "crlf", "blank", "words", "longer-than-a-section"],
)
def test_texts_without_natural_breaks(text: str, chunkers: dict[int, Chunker], count: Counter) -> None:
    check(text, chunkers[256].split(text), 256, count)


def test_paragraphs_are_kept_whole_where_they_fit(chunkers: dict[int, Chunker]) -> None:
    paragraphs = [
        f"Paragraph {i} speaks about subject number {i} and says that it is well.\n\n" for i in range(30)
    ]
    chunks = chunkers[64].split("".join(paragraphs))
    assert all(chunk.text.startswith("Paragraph") and chunk.text.endswith("well.\n\n") for chunk in chunks)


def test_no_chunk_is_small_beside_its_neighbour(chunkers: dict[int, Chunker]) -> None:
    text = "\n\n".join(["Heading", "A long paragraph. " * 40, "Tail."] * 5)
    chunks = chunkers[256].split(text)
    assert all(a.n_tokens + b.n_tokens > 200 for a, b in pairwise(chunks))


def test_special_tokens_in_a_text_are_text(count: Counter) -> None:
    assert count("<|bos|>") > 1


def test_counts_are_those_of_the_serving_models_tokenizer(tokenizer: TokenizerSource, count: Counter) -> None:
    from tokenizers import Tokenizer

    text = "The capital of Iceland is Reykjavik, a city of 216,000.\n"
    assert count(text) == len(Tokenizer.from_str(tokenizer.json).encode(text, add_special_tokens=False).ids)


@settings(deadline=None, max_examples=60)
@given(st.text(alphabet="ก\u0e34\u0e48\u0e33👩\u200d🇳🇱\ufe0fé\u0301漢。", max_size=400))
def test_no_grapheme_is_cut(chunkers: dict[int, Chunker], text: str) -> None:
    whole = {found.start() for found in regex.finditer(r"\X", text)}
    long = {found.start() for found in regex.finditer(r"\X", text) if len(found.group()) > 8}
    starts = {chunk.start for chunk in chunkers[64].split(text)}
    assert starts <= whole or long


def test_texts_without_spaces_are_cut_at_sentences_and_clauses(chunkers: dict[int, Chunker]) -> None:
    sentence = "灯塔由艾伦建造，它在苏格兰的礁石上。"
    chunks = chunkers[64].split(sentence * 20)
    assert len(chunks) > 5
    assert all(chunk.text.endswith(("。", "，")) for chunk in chunks)
    assert sum(chunk.text.endswith("。") for chunk in chunks) > len(chunks) / 2
