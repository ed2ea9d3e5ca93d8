"""Words without grammar."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

from astuner.model_tuner.anomaly_checks.base import AnomalyCheck, CheckedAnswer

# Words without punctuation, of which at least a twentieth are function words in every language of the list.
_MIN_WORDS = 30
_MIN_FUNCTION_WORDS = 0.04

_FUNCTION_WORD_LIST = """
a aber about adı af ako al ale ali all alla als also ama an and any ar are as at atau att auch auf av avec az aŭ
be been bir bu but by był būti can ce cette che come como con could cu các có của da dacă daha dalam dan dans
dapat dari das de del della dem den der des det dev değil di die dili dist dla do docs du e een egy ein eine el
elle eller els em en er es est estas este for from för für geen gibi git gli ha had han has have he her het his
hon i ich if ikke il ile ili in inte into io ir is ist it its için iš ja jak jako je jei jest kaip kaj kan kann
kao kas ke không ki ko kot kui kun kā la lai las le les li libs los lub ma mais me med meg met mit more można
muy my más na naj nav ne nebo nelze nem není new ni nicht nie niet nije nimi nincs no non not nous nu não näytä
nėra o och od oder of og olan ole on only or oraz os other our out para pas per pero più plus poate pole por
pour pro puede på při que qui s saa se she si sich sie się so som some sono su sur sus să số tai tak também te
than that the their them then there they this thể tidak tiek til till tin to trong u um uma un una und untuk up
vagy vai van ve veya voi von voor vous või võti was we wenn were what when which who wie will wir with work
would y yang yok you your yra za zu à är çok è é és în được định į że și
"""
_FUNCTION_WORDS = frozenset(_FUNCTION_WORD_LIST.split())


class WordSalad(AnomalyCheck):
    """Finds long sequences of Latin words without punctuation and without function words."""

    name = "word_salad"

    def find(self, answer: CheckedAnswer) -> str | None:
        """Return a fault if a clause with many words has almost no function words from 25 languages."""
        for clause in re.split(r"[^\w\s'’-]+|\n+|\d+", answer.text):
            words = [word for word in clause.lower().split() if any(map(str.isalpha, word))]
            is_latin = all(char.isascii() or "LATIN" in unicodedata.name(char, "") for char in clause if char.isalpha())
            if len(words) < _MIN_WORDS or not is_latin:
                continue
            share = count_function_words(words) / len(words)
            if share < _MIN_FUNCTION_WORDS:
                return f"{len(words)} words without grammar ({share:.0%} function words): {clause.strip()[:60]!r}"
        return None


def count_function_words(words: Iterable[str]) -> int:
    """Return how many of some lower-case words are function words in a language with Latin letters."""
    return sum(word in _FUNCTION_WORDS for word in words)
