"""Extracts the final answer from a text, and parses it if it is a plain number."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

_BOX_OR_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)

_DECIMAL = r"(?:[1-9]\d{0,2}(?:,\d{3})+|[1-9]\d{0,2}(?: \d{3})+|\d+)(?:\.\d*)?|\.\d+"
_EXPONENT = r"[eE][+-]?\d{1,3}"
_CURRENCY = r"(?:\\?\$|[€£¥₹₩]|\\(?:euro|pounds)\b)?\s*"
_FRACTION = r"\\[dtc]?frac\s*(?:\{\s*(?P<top>[+-]?\d+)\s*\}|(?P<t>\d))\s*(?:\{\s*(?P<bottom>\d+)\s*\}|(?P<b>\d))"
_PERCENT = r"\s*(?:\\?%|(?:\\text\s*\{)?\s*(?:[Pp]er ?cent|[Pp]ercentage|[Pp]ct)\}?)"
_UNIT = (
    r"\s*\\(?:text|textrm|mathrm|mbox)\s*\{[^{}\d]*\}(?:\^\s*\{?\d\}?)?|(?:\s+(?:[A-Za-z]{3,}|cm|mm|km|kg|mg|mL|ml))+"
)
_NUMBER = re.compile(
    rf"(?P<sign>[+-]?)\s*{_CURRENCY}(?P<inner_sign>[+-]?)(?:(?P<decimal>{_DECIMAL})"
    rf"(?:(?P<exponent>{_EXPONENT})|\s*/\s*(?P<over>\d+))?|{_FRACTION})"
    rf"(?:(?P<percent>{_PERCENT})|(?P<unit>{_UNIT}))?\s*\.?"
)
_SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_SCALE = re.compile(rf"\b({'|'.join(_SCALES)})s?\b")
# Words after a number that are not units; the number is then not the whole answer.
_NOT_A_UNIT = re.compile(
    r"\b(?:half|halves|thirds?|quarters?|times|plus|minus|over|and|not|squared|cubed|sqrt|sin|cos|tan|cot|sec|csc|log|exp"
    r"|mod|max|min|gcd|lcm|det|inf|infinity)\b"
)
_WRAPPING = [
    re.compile(pattern, re.DOTALL)
    for pattern in (
        r"\$\$([^$]*)\$\$",
        r"\$([^$]*)\$",
        r"\\\((.*)\\\)",
        r"\\\[(.*)\\\]",
        r"\*\*([^*]*)\*\*",
        r"\\(?:text|textbf|mathrm|mathbf|mathit|displaystyle)\s*\{([^{}]*)\}",
        r"\{([^{}]*)\}",
    )
]
_SPACING = re.compile(r"\\[,;:! ]|~|[\u00a0\u2009\u202f]")


@dataclass(frozen=True, slots=True)
class PlainNumber:
    """A number written in digits.

    Attributes:
        value: the exact number before any percent sign.
        percent: whether a percent sign follows.
        text: the number without currency, unit and separators, for example `1234.5%` or `-3/4`.
    """

    value: Fraction
    percent: bool
    text: str

    def equals(self, other: PlainNumber) -> bool:
        """Return whether the numbers are equal.

        `50%` equals 0.5. It also equals 50, which is a correct answer to a question that asks for a percentage.
        """
        if self.percent == other.percent:
            return self.value == other.value
        percent, plain = (self, other) if self.percent else (other, self)
        return plain.value in (percent.value, percent.value / 100)

    @property
    def is_whole(self) -> bool:
        """Whether the number is an integer without a percent sign."""
        return self.value.denominator == 1 and not self.percent


def final_answer(text: str) -> tuple[str, bool]:
    r"""Return the final answer in `text`, and whether it is marked as such.

    The answer is the content of the last complete `\boxed{…}` (in nested boxes, the inner one), else what follows the
    last `####` on its line (as in GSM8K), else the whole text. Takes linear time.
    """
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed, True
    marked = text.rpartition("####")[2].partition("\n")[0].strip() if "####" in text else ""
    return (marked, True) if marked else (text.strip(), False)


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last complete `\boxed{…}` (in nested boxes, the inner one); None if there is none."""
    open_braces: list[int] = []  # the start of a box's content, -1 for any other brace
    start, end = -1, -1
    for match in _BOX_OR_BRACE.finditer(text):
        token = match[0]
        if token == "}":
            content_start = open_braces.pop() if open_braces else -1
            if content_start > start:
                start, end = content_start, match.start()
        elif token.endswith("{") and token != "\\{":
            open_braces.append(match.end() if token.startswith("\\") else -1)
    return text[start:end].strip() if start >= 0 else None


def plain_number(text: str) -> PlainNumber | None:
    """Parse a number that may have separators, a currency, a unit or a percent sign; None if `text` is not a number."""
    match = _NUMBER.fullmatch(_unwrapped(text))
    if match is None or (match["sign"] and match["inner_sign"]):
        return None
    unit = match["unit"] or ""
    if _NOT_A_UNIT.search(unit):
        return None
    if match["decimal"]:
        top, bottom = re.sub("[ ,]", "", match["decimal"]).rstrip("."), match["over"]
    else:
        top, bottom = match["top"] or match["t"], match["bottom"] or match["b"]
    if bottom is not None and int(bottom) == 0:
        return None
    value = Fraction(top + (match["exponent"] or "")) / int(bottom or 1)
    for scale in _SCALE.finditer(unit):
        value *= _SCALES[scale[1]]
    if "-" in (match["sign"], match["inner_sign"]):
        value = -value
    percent = match["percent"] is not None
    # Decimals are not converted to fractions: math-verify compares their first digits, so that 0.333333 equals 1/3.
    is_decimal = "." in top and not (bottom or match["exponent"] or _SCALE.search(unit))
    text = f"{'-' if value < 0 else ''}{top}" if is_decimal else str(value)
    return PlainNumber(value, percent, f"{text}%" if percent else text)


def _unwrapped(text: str) -> str:
    """Return `text` without thin spaces and without the markup of mathematics or bold text."""
    plain = _SPACING.sub(" ", text).replace("{,}", ",").replace("\u2212", "-").strip()
    while True:
        inner = next((m[1].strip() for pattern in _WRAPPING if (m := pattern.fullmatch(plain))), None)
        if inner is None:
            return plain
        plain = inner


def is_bare_expression(text: str) -> bool:
    r"""Return whether `text` is a mathematical expression without words, such as `2\sqrt{2}` or `x = 5`."""
    rest = re.sub(r"\\(?:text|mathrm|operatorname|begin|end)\s*\{[^{}]*\}|\\[A-Za-z]+", " ", text)
    return re.search(r"[^\W\d_]{2,}", rest) is None and ("\n" not in text or r"\begin" in text)
