"""Front matter of Markdown, and what only looks like it."""

from __future__ import annotations

import pytest

from ragserve.ingest.parsers import Parsed, Raw, parse


def _parsed(text: str) -> Parsed:
    return parse(Raw(text.encode(), "a.md", ".md"))


@pytest.mark.parametrize(
    "text",
    [
        "---\n\nThe first rule.\n\n---\n\nThe second rule.\n",
        "---\r\n\r\nThe first rule.\r\n\r\n---\r\n\r\nThe second rule.\r\n",
        "---\nThe first rule.\n...\nThe second rule.\n",
        "---\n\nNote: the first rule.\n\n---\n\nThe second rule.\n",
        "---\n- one\n- two\n---\nThe second rule.\n",
        "---\n\t[broken: {\n---\nThe second rule.\n",
        "---\ntitle: broken\nThe text goes on without an end mark.\n",
        "+++\nnot toml at all\n+++\nText.\n",
    ],
)
def test_rules_are_no_front_matter(text: str) -> None:
    found = _parsed(text)
    assert (found.text, found.metadata) == (text, {})


def test_front_matter_is_metadata() -> None:
    found = _parsed(
        "---\ntitle: Pilot guide\nauthor: Morag Baillie\ntags: [harbour, 7]\nvalid_until: 2027-03-31\n"
        "postcode: 04110\nversion: 1.10\ndraft: false\ncountry: no\ndepth: 9\nurl: https://a.example\n"
        "place:\n  city: Oban\nempty:\nbig: 99999999999999999999\n---\nThe guide begins.\n"
    )
    assert (found.title, found.text) == ("Pilot guide", "The guide begins.\n")
    assert found.metadata == {
        "author": "Morag Baillie",
        "tags": ["harbour", "7"],
        "valid_until": "2027-03-31",
        "postcode": "04110",
        "version": "1.10",
        "draft": False,
        "country": "no",
        "depth": 9,
        "place.city": "Oban",
        "big": "99999999999999999999",
    }
    toml = _parsed('+++\ntitle = "Tide guide"\nedition = 1.10\n[place]\ncity = "Oban"\n+++\nTide text.\n')
    assert (toml.title, toml.text) == ("Tide guide", "Tide text.\n")
    assert toml.metadata == {"edition": "1.10", "place.city": "Oban"}


def test_a_file_of_front_matter_only_is_read() -> None:
    text = "---\ntitle: Only front\nsummary: The depth at the pier is nine metres.\n---\n"
    found = _parsed(text)
    assert (found.title, found.text) == ("Only front", text)


def test_anchors_do_not_multiply() -> None:
    lines = ["a0: &a0 {x: 1}"] + [f"a{n}: &a{n} {{x: *a{n - 1}, y: *a{n - 1}}}" for n in range(1, 40)]
    assert len(_parsed("---\n" + "\n".join(lines) + "\n---\nText.\n").metadata) <= 64
