"""False positives and recall of the anomaly checks, as a table in Markdown.

    python -m campaigns.anomaly_checks [--pieces 100] [--generated 1000] [--examples]

Normal text comes from this machine: the message catalogues and manuals of its packages in all of their languages, the
descriptions and code of Python packages, and copyright texts; and from the generators of the tests. `--pieces` limits
the pieces of each language. No answer has a request, so that no language is asked for: the hardest case of
`language_switch`. `--examples` prints each false positive and up to three missed answers of each kind.
"""

from __future__ import annotations

import argparse
import gettext
import gzip
import random
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

from astuner.model_tuner.anomaly_checks import CHECKS, CheckedAnswer, find_anomaly
from astuner.model_tuner.codec import ParsedAnswer
from tests.model_tuner.answers import DEGENERATE, NORMAL, cut, project_pieces

_SHARE = Path("/usr/share")
_MIN_CHARS = 50
_MAX_CHARS = 30_000


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pieces", type=int, default=100)
    parser.add_argument("--generated", type=int, default=1000)
    parser.add_argument("--examples", action="store_true")
    arguments = parser.parse_args()
    _print_false_positives(arguments.pieces, arguments.generated, arguments.examples)
    _print_recall(arguments.generated, arguments.examples)


def _print_false_positives(per_language: int, generated: int, examples: bool) -> None:
    print("| normal text | languages | answers | flagged | share | by check |\n|---|---|---|---|---|---|")
    totals: Counter[str] = Counter()
    all_flags: Counter[str] = Counter()
    for name, corpus in _normal_corpora(per_language, generated).items():
        flags: Counter[str] = Counter()
        count = 0
        for language, pieces in corpus.items():
            for piece in pieces:
                count += 1
                for check, find in CHECKS.items():
                    fault = find(CheckedAnswer(piece, ParsedAnswer(piece)))
                    if fault is not None:
                        flags[check] += 1
                        if examples:
                            print(f"  {name}, {language}: {check}: {fault}")
        totals.update(answers=count, flagged=flags.total())
        all_flags += flags
        _print_row(name, str(len(corpus)), count, flags)
    _print_row("all", "", totals["answers"], all_flags)


def _print_row(name: str, languages: str, count: int, flags: Counter[str]) -> None:
    causes = ", ".join(f"{check} {number}" for check, number in flags.most_common()) or "–"
    print(f"| {name} | {languages} | {count:,} | {flags.total()} | {flags.total() / max(count, 1):.3%} | {causes} |")


def _print_recall(generated: int, examples: bool) -> None:
    print("\n| degenerate output | answers | found |\n|---|---|---|")
    for kind, (checks, generate) in DEGENERATE.items():
        rng = random.Random(kind)
        missed = []
        for _ in range(generated):
            text = generate(rng)
            if find_anomaly(CheckedAnswer(text, ParsedAnswer(text)), checks) is None:
                missed.append(text)
        print(f"| {kind} | {generated:,} | {1 - len(missed) / generated:.1%} |")
        for text in missed[: 3 if examples else 0]:
            print(f"  missed: {text!r}")


def _normal_corpora(per_language: int, generated: int) -> dict[str, dict[str, list[str]]]:
    corpora = {
        "message catalogues": _by_language(_message_catalogues(), per_language),
        "manuals": _by_language(_manuals(), per_language),
        "Python packages, copyright texts": _by_language(_english(), per_language * 20),
        "pages and code of astuner": {"en": project_pieces()},
    }
    for kind, generate in NORMAL.items():
        rng = random.Random(kind)
        corpora[f"generated {kind}"] = {"–": [generate(rng) for _ in range(generated)]}
    return corpora


def _by_language(texts: Iterator[tuple[str, str]], limit: int) -> dict[str, list[str]]:
    """Return pieces of (language, text) by language, at most `limit` of each."""
    pieces: dict[str, list[str]] = defaultdict(list)
    for language, text in texts:
        pieces[language] += [piece for piece in cut(text[:_MAX_CHARS]) if len(piece) >= _MIN_CHARS]
    rng = random.Random(0)
    return {language: rng.sample(some, min(limit, len(some))) for language, some in sorted(pieces.items())}


def _message_catalogues() -> Iterator[tuple[str, str]]:
    for file in sorted((_SHARE / "locale").glob("*/LC_MESSAGES/*.mo")):
        with file.open("rb") as stream:
            try:
                messages: dict[object, str] = vars(gettext.GNUTranslations(stream))["_catalog"]
            except (OSError, UnicodeError, ValueError, LookupError):
                continue
        yield file.parts[-3], "\n".join(text for key, text in messages.items() if key and isinstance(key, str))


def _manuals() -> Iterator[tuple[str, str]]:
    for file in sorted((_SHARE / "man").glob("**/man?/*.gz")):
        folder = file.relative_to(_SHARE / "man").parts
        try:
            yield folder[0] if len(folder) > 2 else "en", gzip.decompress(file.read_bytes()).decode()
        except (OSError, UnicodeError):
            continue


def _english() -> Iterator[tuple[str, str]]:
    for package in sorted(distributions(), key=lambda each: str(each.name)):
        yield "en", str(package.metadata.get_payload() or "")
    for file in (*sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")), *sorted(_SHARE.glob("doc/*/copyright"))):
        yield "en", file.read_text(encoding="utf-8", errors="replace")


if __name__ == "__main__":
    main()
