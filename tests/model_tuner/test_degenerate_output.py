"""Degenerate output is found, and ordinary answers are not mistaken for it."""

from __future__ import annotations

import random
import string
import sysconfig
from importlib.metadata import distributions
from pathlib import Path

import pytest

from astuner.model_tuner.codec import ParsedAnswer
from astuner.model_tuner.degenerate_output import find_degenerate_output

ALPHABETS = ["abcdefgh", "абвгдежз", "अआइईउऊ", "กขฃคฅฆ", "אבגדהו", "中文字符"]
REFRAIN = (
    "Row, row, row your boat,\nGently down the stream.\nMerrily, merrily, merrily, merrily,\nLife is but a dream.\n\n"
)


def fault(text: str) -> str | None:
    return find_degenerate_output(text, ParsedAnswer(text), ["nonsense"])


def prose() -> list[str]:
    """The descriptions of the installed packages, and the standard library's code, in pieces as long as an answer."""
    texts = sorted(str(each.metadata.get_payload() or "") for each in distributions())
    texts += [file.read_text(errors="replace") for file in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-f]*.py"))]
    return [text[start : start + 1500] for text in texts for start in range(0, min(len(text), 30_000), 1500)]


def letters(rng: random.Random, lengths: list[int], alphabet: str = string.ascii_lowercase) -> str:
    return " ".join("".join(rng.choice(alphabet) for _ in range(length)) for length in lengths)


def test_false_alarms_on_prose_and_code_are_rare():
    pieces = random.Random(0).sample(prose(), 300)
    alarms = [found for piece in pieces if (found := fault(piece)) is not None]
    assert len(alarms) <= 3, alarms


@pytest.mark.parametrize(
    "text",
    [
        "42",
        "",
        "\\boxed{7}",
        "3.14159265358979323846264338327950288419716939937510582097494459230781640628620899862803482534211706798214808",
        "0" * 300,
        "$$\\int_0^\\infty e^{-x^2}\\,dx = \\frac{\\sqrt{\\pi}}{2}, \\quad \\sum_{k=1}^n k = \\frac{n(n+1)}{2}$$ " * 3,
        "| a | b | c |\n|---|---|---|\n" + "".join(f"| {n} | {n * n} | {n**3} |\n" for n in range(30)),
        "[" + ", ".join(f'{{"id": {n}, "name": "item {n}", "ok": true}}' for n in range(30)) + "]",
        "\n".join(f"{n}. item number {n}" for n in range(1, 80)),
        REFRAIN * 4,
        "使用 Python 编写一个函数,计算两个数的和,然后返回结果。首先我们定义函数,然后测试它是否正确。" * 2,
        "Hello: привет, 你好, สวัสดี, שלום, नमस्ते, 안녕하세요, γεια σας.\nThank you: спасибо, 谢谢, ขอบคุณ, תודה, धन्यवाद",
        "sha256: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        "eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.eyJzdWIiOiIxMjM0NTY3ODkwIiwibmFtZSI6IkpvaG4gRG9lIn0",
        "ha ha ha, that is funny",
    ],
)
def test_ordinary_answers_are_not_degenerate(text: str):
    assert fault(text) is None


@pytest.mark.parametrize("seed", range(10))
def test_random_letters_words_and_scripts_are_degenerate(seed: int):
    rng = random.Random(seed)
    words = sorted(
        {word for piece in prose()[:200] for word in piece.lower().split() if word.isascii() and word.isalpha()}
    )
    salad = [word for word in words if len(word) > 4]
    assert "random letters" in (fault(letters(rng, [rng.randint(3, 9) for _ in range(40)])) or "")
    assert "random letters" in (fault(letters(rng, [200])) or "")
    assert "random letters" in (fault(prose()[0][:600] + letters(rng, [6] * 80)) or "")
    assert "words without grammar" in (fault(" ".join(rng.choice(salad) for _ in range(60))) or "")
    mixed = " ".join(letters(rng, [4], alphabet) for alphabet in rng.choices(ALPHABETS, k=40))
    assert "scripts mixed" in (fault(mixed) or "")
    assert "scripts mixed" in (fault("".join(rng.choice(rng.choice(ALPHABETS)) for _ in range(150))) or "")


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
    ],
)
def test_repetition_is_degenerate(text: str):
    assert "repeats itself" in (fault(text) or "")


def test_broken_characters_are_degenerate():
    assert "broken characters" in (fault("ok \ufffd\ufffd\x01 and so on") or "")
