"""Letters drawn at random."""

from __future__ import annotations

import itertools
import re
import unicodedata

from astuner.model_tuner.anomaly_checks.base import AnomalyCheck, CheckedAnswer, windows

_MIN_PAIRS = 50
# Bits. Windows of text and code in 25 languages with Latin letters stay below 5.4, letters drawn at random have 6.4.
_MAX_BITS_A_PAIR = 5.7

# Row a, column b: the bits of letter b after letter a, minus 1, at most 9, averaged over text in 25 languages and code.
_LETTER_PAIR_TABLE = """
54338646454232648232447855
16772888249276289346288949
28572892273486279443499976
17861867276665269456368965
45445547464332757223557575
28753379188478179354399969
26861754287463369344268958
19861997266566289573368959
45343547654332358423649685
16951988396574269736278997
16661764295475269433376969
16741567156365269844369857
13871879287646239756389979
28422525265675389832469957
54436546454331549233445885
18562874397376249244389949
39756989599387677563082989
16541746265545268543357956
28472775283466348731368955
18781883286676259344367757
33443647354332549223667764
19781979288685289568599958
17752854187574379448695758
34352476296648429761598446
25443757475433329432466766
16751965277554378666366945
"""
_LETTER_PAIR_BITS = _LETTER_PAIR_TABLE.split()

# Keys, hashes and encoded data have digits or signs between their letters. Acronyms are not pronounceable.
_NO_WORD = re.compile(r"[0-9+/=_\\<>{}\[\]%&$#@^|~]|^[A-Z]{2,5}$")


class RandomLetters(AnomalyCheck):
    """Finds Latin letters whose letter pairs lack the frequencies that languages and code have."""

    name = "random_letters"

    def find(self, answer: CheckedAnswer) -> str | None:
        """Return a fault if the pairs of letters in a window are too improbable."""
        for window in windows(answer.text):
            bits = pairs = 0
            words = [word for word in window.split() if not _NO_WORD.search(word)]
            plain = unicodedata.normalize("NFKD", " ".join(words).lower())
            plain = "".join(char for char in plain if not unicodedata.combining(char))
            for word in re.findall(r"[a-z]{2,}", plain):
                pairs += len(word) - 1
                bits += sum(int(_LETTER_PAIR_BITS[ord(a) - 97][ord(b) - 97]) + 1 for a, b in itertools.pairwise(word))
            if pairs >= _MIN_PAIRS and bits / pairs > _MAX_BITS_A_PAIR:
                return f"random letters ({bits / pairs:.1f} bits per pair of letters): {window[:60]!r}"
        return None
