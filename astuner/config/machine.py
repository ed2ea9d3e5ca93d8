"""A machine with GPUs that a configuration is checked for (`astuner check --machine`)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from astuner.errors import ConfigError

_FORM = re.compile(r"([1-9]\d{0,5})x(\w[\w.]*)-(\d+(?:\.\d+)?)G(?:i?B)?", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine with equal GPUs.

    Attributes:
        gpus: number of GPUs.
        name: their type, for messages.
        memory: bytes of one GPU.
    """

    gpus: int
    name: str
    memory: int

    @staticmethod
    def parse(text: str) -> Machine:
        """Read a text such as `8xH100-80G`: number, type, and GiB of a GPU.

        Raises:
            ConfigError: the text has another form.
        """
        match = _FORM.fullmatch(text)
        if match is None or float(match[3]) == 0:
            raise ConfigError(
                f"--machine is {text!r}; expected NUMBERxTYPE-MEMORYG, such as 8xH100-80G or 1xL4-24G: the number of "
                "GPUs, their type, and the GiB of each"
            )
        return Machine(int(match[1]), match[2], int(float(match[3]) * 2**30))
