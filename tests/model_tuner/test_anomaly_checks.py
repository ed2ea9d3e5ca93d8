"""Degenerate output is found, and ordinary answers are not mistaken for it."""

from __future__ import annotations

import random
from typing import get_args

import pytest

from astuner.config.rollout import AnomalyCheckName
from astuner.model_tuner.anomaly_checks import CHECKS, NONSENSE, CheckedAnswer, find_anomaly
from astuner.model_tuner.codec import ParsedAnswer
from tests.model_tuner.answers import ARTICLES, DEGENERATE, NORMAL, letters, project_pieces, prose

REFRAIN = (
    "Row, row, row your boat,\nGently down the stream.\nMerrily, merrily, merrily, merrily,\nLife is but a dream.\n\n"
)


def fault(text: str, *checks: str, request: str = "") -> str | None:
    answer = CheckedAnswer(text, ParsedAnswer(text), [{"role": "user", "content": request}])
    found = find_anomaly(answer, checks or CHECKS)
    return found and f"{found[0]}: {found[1]}"


def test_every_check_is_accepted_by_the_configuration():
    assert {*CHECKS, "nonsense"} == set(get_args(AnomalyCheckName))
    assert set(NONSENSE) == CHECKS.keys() - {"wrong_toolcall", "language_switch"}


def test_pages_and_code_of_this_project_are_normal():
    pieces = project_pieces(limit=250)
    assert [found for piece in pieces if (found := fault(piece)) is not None] == []


@pytest.mark.parametrize("kind", NORMAL)
def test_generated_answers_are_normal(kind: str):
    rng = random.Random(kind)
    assert [found for _ in range(40) if (found := fault(NORMAL[kind](rng))) is not None] == []


@pytest.mark.parametrize("kind", DEGENERATE)
def test_generated_degenerate_answers_are_found(kind: str):
    checks, generate = DEGENERATE[kind]
    rng = random.Random(kind)
    missed = [text for text in (generate(rng) for _ in range(60)) if fault(text, *checks) is None]
    assert len(missed) <= 3, missed


@pytest.mark.parametrize(
    "text",
    [
        "42",
        "",
        "\\boxed{7}",
        "3.14159265358979323846264338327950288419716939937510582097494459230781640628620899862803482534211706798214808",
        "0" * 300,
        "0 " * 900,
        "- " * 40,
        "$$\\int_0^\\infty e^{-x^2}\\,dx = \\frac{\\sqrt{\\pi}}{2}, \\quad \\sum_{k=1}^n k = \\frac{n(n+1)}{2}$$ " * 3,
        "| a | b | c |\n|---|---|---|\n" + "".join(f"| {n} | {n * n} | {n**3} |\n" for n in range(30)),
        "[" + ", ".join(f'{{"id": {n}, "name": "item {n}", "ok": true}}' for n in range(30)) + "]",
        REFRAIN * 4,
        "使用 Python 编写一个函数,计算两个数的和,然后返回结果。首先我们定义函数,然后测试它是否正确。" * 2,
        "Hello: привет, 你好, สวัสดี, שלום, नमस्ते, 안녕하세요, γεια σας.\nThank you: спасибо, 谢谢, ขอบคุณ, תודה, धन्यवाद",
        "Запустите git clone, затем откройте файл README.md и выполните pip install astuner в новой оболочке.",
        "The Greek letter π is about 3, and Привет means hello in the language of the book, in which 你好 does, too.",
        "eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.eyJzdWIiOiIxMjM0NTY3ODkwIiwibmFtZSI6IkpvaG4gRG9lIn0",
        "The formats are PAK, PBM, PCD, PCF, PCX, PDB, PDF, PFB, PFM, PGM, PGN, PKCS, PNG, PNM, PPD, PPM, PPT, PSD.",
        "ha ha ha, that is funny",
    ],
)
def test_ordinary_answers_are_not_degenerate(text: str):
    assert fault(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "The answer is three, I think. " * 12,
        "Let me check this again.\n" * 12,
        "我再检查一遍这个答案。" * 12,
        "First, I will add the numbers. " + "Wait, no. Let me add them again. " * 10,
        "la " * 300,
        "ab" * 40,
        '{"tool": "search"}' * 12,
        "Step 1: add. Step 2: carry. Step 3: write. " * 8,
        ("The sum is nine. We add the digits again. " * 9)[:-60],
        "A normal start of an answer. " + "one two three four. five six seven eight.\n" * 9,
        "0 " * 2000,
    ],
)
def test_repetition_is_found(text: str):
    assert "repetition: repeats itself" in (fault(text, "nonsense") or "")


def test_a_fault_after_a_normal_start_is_found():
    rng = random.Random(0)
    start = prose(rng, 12)
    assert "random_letters" in (fault(start + letters(rng, [6] * 80)) or "")
    assert "random_letters" in (fault(letters(rng, [200])) or "")


def test_broken_characters_are_found():
    assert "broken_characters: 3 broken characters" in (fault("ok \ufffd\ufffd\x01 and so on", "nonsense") or "")


def test_a_switch_of_the_language_is_found_unless_the_request_uses_it():
    text = ARTICLES["en"][:-1] + ", " + ARTICLES["ru"]
    assert "changes to cyrillic letters after 'r in a spirit of brotherhood, '" in (fault(text) or "")
    for request in ("Скажи это и по-русски.", "Say it in English, then in Russian.", "Translate the article."):
        assert fault(text, request=request) is None
    assert fault(f"{ARTICLES['en']}\n\n{ARTICLES['ru']}") is None
    assert "changes to latin" in (fault(ARTICLES["zh"] + ARTICLES["en"]) or "")


def test_only_the_checks_of_the_list_run():
    text = ARTICLES["en"] + ARTICLES["ru"]
    assert fault(text, "nonsense", "wrong_toolcall") is None
    assert fault("la " * 300, "random_letters", "language_switch") is None
    with pytest.raises(KeyError, match="there is no anomaly check 'madness'"):
        fault(text, "madness")
