"""Normal and degenerate answers, generated with seeds, for the anomaly checks."""

from __future__ import annotations

import json
import random
import re
import string
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
PIECE = 1500
"""Length of an answer that is cut from a file, in characters."""

_ARTICLE = Path(__file__).parent / "data" / "human_rights_article_1.tsv"
ARTICLES = dict(line.split("\t") for line in _ARTICLE.read_text(encoding="utf-8").splitlines())
"""Article 1 of the Universal Declaration of Human Rights by language, in fifteen scripts (United Nations)."""

_ALPHABETS = ("abcdefgh", "абвгдежз", "अआइईउऊ", "กขฃคฅฆ", "אבגדהו", "中文字符")
_PROSE = (
    "First we read the question again, because the numbers in it matter. The train leaves at nine and arrives at noon, "
    "so the journey takes three hours. It covers two hundred and forty miles in this time. We divide the distance by "
    "the time and find the average speed. Let us check the result with another method, which should give the same "
    "number. If it does not, one of the steps has a mistake, and we look for it. The tank holds forty litres when it "
    "is full. After the first day a quarter of it was left. How much did they use on the way home? They used what was "
    "there in the morning minus what remained in the evening."
)
SENTENCES = re.findall(r"[^.?]+[.?] ?", _PROSE)
_SALAD_WORDS = (
    "window yellow triangle running bottle market december silence copper engine garden velvet purchase thunder "
    "marble theory pencil horizon battery welcome forest decide seventeen carpet moment orange physics ladder "
    "elephant candle bridge ticket morning explain winter diamond pillow kitchen remember station"
)
_SALAD = _SALAD_WORDS.split()


def project_pieces(limit: int | None = None, seed: int = 0) -> list[str]:
    """Return the pages and the code of this project, in pieces as long as an answer; `limit` samples some of them."""
    files = [*sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "astuner").rglob("*.py"))]
    pieces = [piece for file in files for piece in cut(file.read_text(encoding="utf-8"))]
    return pieces if limit is None else random.Random(seed).sample(pieces, min(limit, len(pieces)))


def cut(text: str) -> list[str]:
    """Return a text in pieces as long as an answer."""
    return [text[start : start + PIECE] for start in range(0, len(text), PIECE)]


def prose(rng: random.Random, sentences: int) -> str:
    """Return sentences in English."""
    return "".join(rng.choice(SENTENCES) for _ in range(sentences))


def letters(rng: random.Random, lengths: list[int], alphabet: str = string.ascii_lowercase) -> str:
    """Return words of random letters."""
    return " ".join("".join(rng.choice(alphabet) for _ in range(length)) for length in lengths)


def _article(rng: random.Random) -> str:
    text = rng.choice(list(ARTICLES.values()))
    return f"{rng.choice(['', '# ', '1. ', '> ', '“'])}{text}\n\n{text[: rng.randint(5, 80)]} {rng.randint(0, 999)}."


def _translations(rng: random.Random) -> str:
    some = rng.sample(sorted(ARTICLES), rng.randint(2, 6))
    mark = rng.choice([": ", " — ", " | ", "\n", " → "])
    return "The sentence in these languages:\n\n" + "\n".join(f"- {name}{mark}{ARTICLES[name]}" for name in some)


def _quoted(rng: random.Random) -> str:
    text = rng.choice(list(ARTICLES.values()))[: rng.randint(4, 60)]
    return f"{prose(rng, 2)}The text says {rng.choice(['“{}”', '({})', '`{}`', '«{}»']).format(text)}. {prose(rng, 2)}"


def _latex(rng: random.Random) -> str:
    lines = []
    for _ in range(rng.randint(2, 20)):
        a, b, n = rng.randint(1, 99), rng.randint(1, 99), rng.randint(2, 9)
        lines.append(rng.choice([
            rf"$$\int_0^{{{a}}} x^{{{n}}}\,dx = \frac{{{a}^{{{n + 1}}}}}{{{n + 1}}}$$",
            rf"\[ \sum_{{k=1}}^{{{n}}} k^2 = \frac{{{n}({n + 1})(2\cdot {n}+1)}}{{6}} \]",
            rf"\begin{{pmatrix}} {a} & 0 & 0 \\ 0 & {b} & 0 \\ 0 & 0 & {n} \end{{pmatrix}}",
            rf"so that $\sqrt{{{a}}} \le {b}$ and $\alpha_{{{n}}} \to \infty$, where $\pi \approx 3.14$",
        ]))  # fmt: skip
    return "\n".join(lines) + rf"\n\boxed{{{rng.randint(0, 999)}}}"


def _signs(rng: random.Random) -> str:
    symbols = "π≤é→√≥∑∫≠∞±×÷αβγθλμσφωΔΩ∈∀∃⇒ℝℤ°€£"
    equations = [f"{rng.choice(symbols)}{rng.randint(0, 9)} {rng.choice(symbols)} {rng.choice(symbols)} = "
                 f"{rng.randint(0, 99)}" for _ in range(rng.randint(3, 60))]  # fmt: skip
    return rng.choice([", ", "\n", "; "]).join(equations)


def _matrix(rng: random.Random) -> str:
    rows, columns = rng.randint(2, 40), rng.randint(2, 40)
    values = rng.choice(["0", "01", "0123456789", ".#", "_X", "-"])
    mark = rng.choice([" ", ", ", "\t", ""])
    return "\n".join(mark.join(rng.choice(values) for _ in range(columns)) for _ in range(rows))


def _table(rng: random.Random) -> str:
    rows = [f"| {n} | {rng.choice(['yes', 'no', 'π ≤ 4', 'да', '是'])} | {n * rng.randint(1, 9)} |"
            for n in range(rng.randint(2, 40))]  # fmt: skip
    return "| n | fits | value |\n|---|---|---|\n" + "\n".join(rows)


def _json(rng: random.Random) -> str:
    rows = [{"id": n, "name": rng.choice(SENTENCES).strip(), "ok": True, "tags": []} for n in range(rng.randint(1, 20))]
    return json.dumps(rows, indent=rng.choice([None, 2]))


def _code(rng: random.Random) -> str:
    names = rng.sample(_SALAD, 4)
    return (
        f"```python\ndef {names[0]}({names[1]}: list[int]) -> int:\n    {names[2]} = [0] * {rng.randint(2, 99)}\n"
        f"    for {names[3]} in range(len({names[1]})):\n        {names[2]}[{names[3]}] += {names[1]}[{names[3]}]\n"
        f"    return sum({names[2]})\n```\n\n{prose(rng, 3)}"
    )


def _log(rng: random.Random) -> str:
    keys = [f"{rng.getrandbits(160):040x} {rng.choice(_SALAD)}.py" for _ in range(rng.randint(2, 30))]
    return "\n".join(f"2024-05-{1 + n % 28:02} 12:00:{n % 60:02} INFO {key}" for n, key in enumerate(keys))


def _refrain(rng: random.Random) -> str:
    refrain = "Row, row, row your boat,\nGently down the stream.\nMerrily, merrily, merrily, merrily,\n\n"
    return "".join(refrain + rng.choice(SENTENCES) + "\n" for _ in range(rng.randint(1, 4)))


def _numbers(rng: random.Random) -> str:
    return rng.choice(["", "0.", "-", "$"]) + rng.choice([
        "".join(rng.choices(string.digits, k=rng.randint(1, 400))),
        "0" * rng.randint(1, 400),
        ", ".join(str(n * n) for n in range(rng.randint(1, 200))),
        "\n".join(f"{n}. item number {n}" for n in range(1, rng.randint(2, 80))),
    ])  # fmt: skip


NORMAL: Mapping[str, Callable[[random.Random], str]] = {
    "articles in 15 scripts": _article, "translations": _translations, "quotations": _quoted, "latex": _latex,
    "signs": _signs, "matrices": _matrix, "tables": _table, "json": _json, "code": _code, "logs": _log,
    "refrains": _refrain, "numbers": _numbers,
    "prose": lambda rng: f"<think>\n{prose(rng, 8)}\n</think>\n\n{prose(rng, 2)}",
}  # fmt: skip
"""Generators of normal answers by kind."""


def _loop(rng: random.Random) -> str:
    kind = rng.randrange(4)
    if kind == 0:
        block = rng.choice(SENTENCES)
    elif kind == 1:
        block = rng.choice(list(ARTICLES.values()))[: rng.randint(12, 120)]
    elif kind == 2:
        block = " ".join(rng.sample(_SALAD, rng.randint(1, 3))) + " "
    else:
        block = json.dumps({"tool": rng.choice(_SALAD), "n": rng.randint(0, 9)}) + rng.choice(["\n", " "])
    repeated = block * max(rng.randint(9, 60), 80 // len(block) + 2)
    return prose(rng, rng.randint(0, 6)) + repeated[: len(repeated) - rng.randrange(len(block))]


def _sign_loop(rng: random.Random) -> str:
    return prose(rng, rng.randint(0, 3)) + rng.choice(["0 ", "0", "!", "-", ", ", "🙂 ", "a", "1, "]) * 2500


def _random_letters(rng: random.Random) -> str:
    lengths = [rng.randint(3, 9) for _ in range(rng.randint(40, 200))]
    return rng.choice(["", prose(rng, 6)]) + letters(rng, lengths)


def _word_salad(rng: random.Random) -> str:
    return rng.choice(["", prose(rng, 6)]) + " ".join(rng.choices(_SALAD, k=rng.randint(40, 200)))


def _mixed_scripts(rng: random.Random) -> str:
    if rng.random() < 0.5:
        return "".join(rng.choice(rng.choice(_ALPHABETS)) for _ in range(rng.randint(150, 600)))
    return " ".join(letters(rng, [4], alphabet) for alphabet in rng.choices(_ALPHABETS, k=rng.randint(40, 120)))


def _broken(rng: random.Random) -> str:
    text = prose(rng, rng.randint(1, 6))
    return "".join(rng.choice("\ufffd\x00\x01\x1b") if rng.random() < 0.15 else char for char in text)


def language_switch(rng: random.Random) -> str:
    """Return an answer that changes its script in the middle of a paragraph."""
    first, second = rng.sample(sorted(ARTICLES), 2)
    while {first, second} <= {"zh", "ja", "ko"}:
        first, second = rng.sample(sorted(ARTICLES), 2)
    start, rest = ARTICLES[first], ARTICLES[second]
    at, skipped = rng.randint(len(start) // 2, len(start)), rng.randint(0, len(rest) // 4)
    return start[:at] + rng.choice([" ", ""]) + rest[skipped:] + rng.choice(["", " 42", "\n\n\\boxed{42}"])


DEGENERATE: Mapping[str, tuple[tuple[str, ...], Callable[[random.Random], str]]] = {
    "loops of text": (("repetition",), _loop),
    "loops of signs": (("repetition",), _sign_loop),
    "random letters": (("random_letters",), _random_letters),
    "word salad": (("word_salad",), _word_salad),
    "mixed scripts": (("mixed_scripts",), _mixed_scripts),
    "broken characters": (("broken_characters",), _broken),
    "language switches": (("language_switch",), language_switch),
}
"""Generators of degenerate answers by kind, with the checks that must find them."""
