"""The files of a generation: the tasks, and a state that contains their completeness and cost."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from hashlib import sha256
from pathlib import Path
from typing import Any

from astuner.config.task_sources import DataGenerationConfig
from astuner.helper_llm.usage import LlmUsage
from astuner.run_record.files import dump_json, write_atomically
from astuner.system.redaction import redact
from astuner.task_sources.data_generation.documents import Chunk
from astuner.task_sources.data_generation.evaluation import Row

_STATE_SUFFIX = ".state.json"
# Keys that do not change which tasks are generated.
_IRRELEVANT = {"llm", "train_output_path", "validation_output_path", "document_reader", "example_path"}


class GenerationFiles:
    """The files of one generation.

    Attributes:
        usage: the use of the helper model so far.
    """

    def __init__(
        self, config: DataGenerationConfig, chunks: Sequence[Chunk], examples: Sequence[Mapping[str, Any]]
    ) -> None:
        self._config = config
        self._training = Path(config.train_output_path).expanduser()
        self._validation = Path(config.validation_output_path).expanduser()
        self._state = self._training.with_name(self._training.name + _STATE_SUFFIX)
        content = {
            "config": config.model_dump(mode="json", exclude=_IRRELEVANT),
            "temperature": config.llm.temperature,
            "chunks": [asdict(chunk) for chunk in chunks],
            "examples": list(examples),
        }
        self._fingerprint = sha256(json.dumps(content, sort_keys=True).encode("utf-8", "surrogatepass")).hexdigest()
        state = self._read_state()
        self._result = state.get("result") if self._files_exist() else None
        known = {field.name for field in fields(LlmUsage)}
        self.usage = LlmUsage(**{name: value for name, value in state.get("usage", {}).items() if name in known})

    def _read_state(self) -> dict[str, Any]:
        """Return the state of an earlier process with the same configuration and documents; else an empty one."""
        try:
            state = json.loads(self._state.read_bytes())
        except (OSError, ValueError):
            return {}
        return state if isinstance(state, dict) and state.get("fingerprint") == self._fingerprint else {}

    def _files_exist(self) -> bool:
        return self._training.is_file() and (self._validation.is_file() or not self._config.validation_share)

    def finished(self) -> tuple[int, int, dict[str, int]] | None:
        """Return the numbers of tasks and the causes, if the files are complete and up to date; else None."""
        if self._result is None:
            return None
        return self._result["training"], self._result["validation"], self._result["left_out"]

    def save_usage(self, usage: LlmUsage) -> None:
        """Save the use of the helper model so far."""
        self.usage = usage
        state = {"fingerprint": self._fingerprint, "usage": asdict(usage), "result": self._result}
        write_atomically(self._state, dump_json(state))

    def write(self, rows: Sequence[Row], left_out: Mapping[str, int]) -> tuple[int, int]:
        """Write the tasks, and return the numbers of training and validation tasks."""
        training, validation = _split(rows, self._config.validation_share, self._config.seed)
        parts = [(self._training, training)]
        parts += [(self._validation, validation)] if self._config.validation_share else []
        for path, part in parts:
            lines = (dump_json({name: redact(str(value)) for name, value in row.items()}) + b"\n" for row in part)
            write_atomically(path, b"".join(lines))
        self._result = {"training": len(training), "validation": len(validation), "left_out": dict(left_out)}
        return len(training), len(validation)


def _split(rows: Sequence[Row], share: float, seed: int) -> tuple[list[Row], list[Row]]:
    """Split rows so that no chunk has tasks in both parts, if there are several chunks."""
    wanted = min(round(len(rows) * share), len(rows) - 1)
    sources = list(dict.fromkeys(str(row["source"]) for row in rows))
    rng = random.Random(seed)
    rng.shuffle(sources)
    chosen: set[str] = set()
    for source in sources[:-1]:
        members = sum(row["source"] in {*chosen, source} for row in rows)
        if members <= wanted:
            chosen.add(source)
    if chosen or not wanted:
        is_validation = [row["source"] in chosen for row in rows]
    else:
        numbers = set(rng.sample(range(len(rows)), wanted))
        is_validation = [number in numbers for number in range(len(rows))]
    pairs = list(zip(rows, is_validation, strict=True))
    return [row for row, is_val in pairs if not is_val], [row for row, is_val in pairs if is_val]
