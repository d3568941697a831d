"""Where an answer's sentences begin and end, and which markers belong to them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragserve.answering.answer_sentences import sentences
from ragserve.answering.citations import MarkerFilter


def pieces(answer: str) -> list[str]:
    markers = MarkerFilter(9)
    assert markers.feed(answer) + markers.end() == answer
    return [answer[start:end] for start, end in sentences(answer, markers.markers)]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Paris", ["Paris"]),
        ("", []),
        (
            "Alan built it in 1844. Robert built Bell Rock.",
            ["Alan built it in 1844.", "Robert built Bell Rock."],
        ),
        ("Mr. Stevenson built it. He was Scottish.", ["Mr. Stevenson built it.", "He was Scottish."]),
        (
            "Alan built it. [1] It was lit in 1844. [2][3]",
            ["Alan built it. [1]", "It was lit in 1844. [2][3]"],
        ),
        ("Alan built it [1]. It was lit later [2].", ["Alan built it [1].", "It was lit later [2]."]),
        ("- Alan\n- Robert", ["- Alan", "- Robert"]),
        ("It costs 2.5 pounds and 3.75 euros.", ["It costs 2.5 pounds and 3.75 euros."]),
        (
            "灯塔由艾伦·史蒂文森建造完成于一八四四年。它在苏格兰。",
            ["灯塔由艾伦·史蒂文森建造完成于一八四四年。", "它在苏格兰。"],
        ),
        (
            "他说：「灯塔建于一八四四年，由艾伦建造。」它很高！[1] 真的吗？",
            ["他说：「灯塔建于一八四四年，由艾伦建造。」", "它很高！[1] 真的吗？"],
        ),
        (
            "متى بُنيت المنارة في الميناء؟ بُنيت عام 1844 على يد آلان.",
            ["متى بُنيت المنارة في الميناء؟", "بُنيت عام 1844 على يد آلان."],
        ),
        (
            "یہ مینارہ ایلن نے بنایا۔ یہ 1844 میں روشن ہوا۔",
            ["یہ مینارہ ایلن نے بنایا۔", "یہ 1844 میں روشن ہوا۔"],
        ),
        ("दीपस्तंभ एलन ने बनाया। वह 1844 में जला॥", ["दीपस्तंभ एलन ने बनाया।", "वह 1844 में जला॥"]),
        ("መብራቱን አለን ሠራው አሉ። በ1844 ተበራ አሉ።", ["መብራቱን አለን ሠራው አሉ።", "በ1844 ተበራ አሉ።"]),
        ("မီးပြတိုက်ကို တည်ဆောက်ခဲ့သည်။ ၁၈၄၄ တွင် ဖွင့်သည်။", ["မီးပြတိုက်ကို တည်ဆောက်ခဲ့သည်။", "၁၈၄၄ တွင် ဖွင့်သည်။"]),
        ("គេបានសាងសង់ប្រទីប។ វាភ្លឺនៅឆ្នាំ១៨៤៤៕", ["គេបានសាងសង់ប្រទីប។", "វាភ្លឺនៅឆ្នាំ១៨៤៤៕"]),
        (
            "Φάρος του 1844; Χτίστηκε εδώ. Ναι, εδώ ακριβώς.",
            ["Φάρος του 1844; Χτίστηκε εδώ.", "Ναι, εδώ ακριβώς."],
        ),
        (
            "ประภาคารแห่งนี้สร้างขึ้นโดยอลันสตีเวนสันในสกอตแลนด์ มันเปิดใช้งานครั้งแรกเมื่อปี 1844 และยังใช้อยู่",
            [
                "ประภาคารแห่งนี้สร้างขึ้นโดยอลันสตีเวนสันในสกอตแลนด์",
                "มันเปิดใช้งานครั้งแรกเมื่อปี 1844 และยังใช้อยู่",
            ],
        ),
        ("値は３．５です。次は４．２です。", ["値は３．５です。次は４．２です。"]),
    ],
)
def test_sentences(answer: str, expected: list[str]) -> None:
    assert pieces(answer) == expected


@given(st.text(st.sampled_from([*"ab. \n[]12!」ก", "。", "؟"]), max_size=90))
def test_they_are_in_order_and_hold_all_but_white_space(answer: str) -> None:
    found = sentences(answer)
    kept = "".join(answer[start:end] for start, end in found)
    assert "".join(kept.split()) == "".join(answer.split())
    assert all(a[1] <= b[0] for a, b in pairwise(found))
