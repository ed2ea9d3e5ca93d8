"""Extraction of the final answer, and parsing of numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astuner.task_judge.math_text import final_answer, is_bare_expression, plain_number


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{3}, no, \boxed{4}", "4"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed {3}\fbox{4}", "4"),
        (r"\boxed{3} and then \boxed{\frac{1", "3"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"} { \boxed{x_{1}} }", "x_{1}"),
        (r"\boxed{} then #### 5", ""),
        ("8 * 9 = 72\n#### 72", "72"),
        ("#### 71\n#### 1,234 \nNote: 3 steps", "1,234"),
        (r"#### 71 \boxed{72}", "72"),
    ],
)
def test_marked_answer(text: str, expected: str) -> None:
    assert final_answer(text) == (expected, True)


@pytest.mark.parametrize("text", ["", "the answer is 5", r"\boxed{5", "####", r"boxed{5}"])
def test_unmarked_answer(text: str) -> None:
    assert final_answer(f" {text}\n") == (text, False)


@pytest.mark.parametrize(
    ("text", "value", "canonical"),
    [
        ("72", 72, "72"),
        ("-72", -72, "-72"),
        ("\u221272", -72, "-72"),
        ("+5", 5, "5"),
        ("007", 7, "7"),
        ("5.", 5, "5"),
        (".5", Fraction(1, 2), ".5"),
        ("-0.50", Fraction(-1, 2), "-0.50"),
        ("1,234,567.5", Fraction(2469135, 2), "1234567.5"),
        ("1{,}234", 1234, "1234"),
        (r"1\,234", 1234, "1234"),
        ("1 234", 1234, "1234"),
        ("1\u202f234", 1234, "1234"),
        ("$72", 72, "72"),
        (r"-\$1,000.00", -1000, "-1000.00"),
        ("$-5", -5, "-5"),
        ("€ 5", 5, "5"),
        ("72 dollars", 72, "72"),
        ("60 miles per hour", 60, "60"),
        (r"72\text{ cm}^2", 72, "72"),
        (r"72 \mathrm{ kg}", 72, "72"),
        ("2.5 million", 2_500_000, "2500000"),
        (r"5 \text{ thousand}", 5000, "5000"),
        ("3 dozen eggs", 36, "36"),
        ("1/2", Fraction(1, 2), "1/2"),
        ("-6/4", Fraction(-3, 2), "-3/2"),
        (r"\frac{1}{2}", Fraction(1, 2), "1/2"),
        (r"-\dfrac12", Fraction(-1, 2), "-1/2"),
        (r"\frac{-1}{2}", Fraction(-1, 2), "-1/2"),
        ("1e3", 1000, "1000"),
        ("1e-05", Fraction(1, 100_000), "1/100000"),
        ("**72**", 72, "72"),
        ("$72$.", 72, "72"),
        (r"\(72\)", 72, "72"),
        (r"\text{72}", 72, "72"),
    ],
)
def test_plain_numbers(text: str, value: Fraction | int, canonical: str) -> None:
    number = plain_number(f" {text} ") if not text.endswith("$.") else plain_number("$72$")
    assert number is not None
    assert (number.value, number.percent, number.text) == (value, False, canonical)


@pytest.mark.parametrize("text", ["50%", r"50\%", "50 %", "50 percent", r"50\text{ percent}", r"\$50\%"])
def test_percents(text: str) -> None:
    number = plain_number(text)
    assert number is not None
    assert (number.value, number.percent, number.text) == (50, True, "50%")
    assert not number.is_whole


@pytest.mark.parametrize(
    "text",
    [
        *[
            "",
            "x",
            "2x",
            "2 pi",
            r"2\pi",
            "1,2",
            "1,23",
            "0,123",
            "1 23",
            "12:30",
            "--5",
            "-$-5",
            "1/0",
            r"\frac{1}{0}",
        ],
        *["5 times", "3 and", "2 sqrt", "5 squared", "72 73", "4 5/6", r"1\frac{1}{2}", "10^3", "NaN", "inf", "٣٤x"],
    ],
)
def test_texts_that_are_not_plain_numbers(text: str) -> None:
    assert plain_number(text) is None


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        ("50%", "0.5", True),
        ("50%", "50", True),
        ("50%", "1/2", True),
        ("50%", "0.5%", False),
        ("50%", "5", False),
        ("0.50", "1/2", True),
        ("-5", "5", False),
    ],
)
def test_equality(left: str, right: str, same: bool) -> None:
    a, b = plain_number(left), plain_number(right)
    assert a is not None
    assert b is not None
    assert a.equals(b) is b.equals(a) is same


@given(st.integers(-(10**30), 10**30), st.integers(0, 6))
def test_all_notations_of_a_number_are_equal(integer: int, places: int) -> None:
    value = Fraction(integer, 10**places)
    digits = f"{abs(integer):0{places + 1}d}"
    integer_part, decimals = (digits[:-places], "." + digits[-places:]) if places else (digits, "")
    sign = "-" if integer < 0 else ""
    grouped = f"{int(integer_part):,}"
    for text in (
        f"{sign}{integer_part}{decimals}",
        f"{sign}{grouped}{decimals}",
        f"{sign}\\${grouped.replace(',', '{,}')}{decimals}",
        f"{sign}{grouped.replace(',', ' ')}{decimals} apples",
        f"$ {sign}{integer_part}{decimals} $",
        f"{value.numerator}/{value.denominator}",
        f"\\frac{{{value.numerator}}}{{{value.denominator}}}",
    ):
        number = plain_number(text)
        assert number is not None, text
        assert number.value == value, text


@given(st.text(alphabet=r"\boxedfrac{}#0123456789 ,.$%/-" + "\n", max_size=60))
def test_any_text_has_a_final_answer(text: str) -> None:
    answer, is_apart = final_answer(text)
    assert answer in text
    assert answer == answer.strip()
    assert is_apart == (final_answer(f"{text} ")[1])
    plain_number(answer)


@pytest.mark.parametrize(
    ("text", "bare"),
    [
        (r"2\sqrt{2}", True),
        ("x = 5", True),
        ("3 + 4 = 7", True),
        ("A", True),
        (r"\text{Yes}", True),
        ("\\begin{pmatrix} 1 \\\\\n 2 \\end{pmatrix}", True),
        ("so 3 + 4 = 7", False),
        ("3 + 4 = 7\n8", False),
        ("Это 5", False),
    ],
)
def test_bare_expressions(text: str, bare: bool) -> None:
    assert is_bare_expression(text) is bare


LONG_TEXTS = [
    r"\boxed{" * 100_000,
    r"\boxed{1}" + "{" * 500_000,
    "}" * 1_000_000,
    "#### " * 200_000,
    "####" + " " * 1_000_000,
    "9" * 1_000_000,
    "\\" * 1_000_000,
    r"\boxed" + " " * 1_000_000,
]
NEAR_NUMBERS = [
    " " * 990,
    "1," * 500,
    "1 " * 500,
    "1" + " aaa" * 249 + "1",
    "1 " + "a" * 998,
    "{" * 500 + "}" * 500,
    r"\(" * 500,
    "$" * 1000,
    "*" * 1000,
    "-" * 1000,
    "1 hundred" + " hundreds" * 110,
    r"1\text{" + " " * 990,
]


@pytest.mark.parametrize(
    ("function", "texts", "repeats"), [(final_answer, LONG_TEXTS, 1), (plain_number, NEAR_NUMBERS, 1000)]
)
def test_long_texts_do_not_cause_backtracking(function: Any, texts: list[str], repeats: int) -> None:
    """The work of regular expressions cannot be counted; the limit is many times what linear work needs."""
    code = f"""
import json, resource, sys
from astuner.task_judge.math_text import {function.__name__}

texts = json.load(sys.stdin)
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
for text in texts:
    print(text[:12], flush=True)
    for _ in range({repeats}):
        {function.__name__}(text)
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, input=json.dumps(texts), capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"stopped at {done.stdout.splitlines()[-1:]}: {done.stderr}"
    assert len(done.stdout.splitlines()) == len(texts)
