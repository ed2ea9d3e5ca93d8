"""Generates tasks with a helper model, verifies, filters and deduplicates them, and writes them to files."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loguru import logger

from astuner.config.data import DatasetFileConfig, DatasetFileSplit
from astuner.config.task_sources import DataGenerationConfig
from astuner.errors import ConfigError, TaskDataError
from astuner.helper_llm.client import LlmClient, NoAnswer
from astuner.helper_llm.usage import LlmUsage
from astuner.task_reader.dataset_file import file_splits
from astuner.task_reader.reader import describe_left_out
from astuner.task_sources.data_generation.documents import Chunk, read_chunks
from astuner.task_sources.data_generation.evaluation import Row, evaluate_rows
from astuner.task_sources.data_generation.output import GenerationFiles
from astuner.task_sources.data_generation.questions import (
    ComparedAnswers,
    GeneratedTasks,
    SolvedTask,
    comparison_request,
    generation_request,
    solution_request,
    tasks_fault,
)
from astuner.task_sources.data_generation.similarity import similar_to_earlier

_WORDS = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class GenerationReport:
    """The result of a generation.

    Attributes:
        training, validation: the numbers of tasks.
        left_out: the number of generated tasks that were left out, by cause.
        usage: the use of the helper model in all processes that worked on the tasks.
        reused: whether the files were already there, so that nothing was generated.
    """

    training: int
    validation: int
    left_out: Mapping[str, int]
    usage: LlmUsage
    reused: bool = False


def generate_tasks(config: DataGenerationConfig, *, base_dir: Path, search: Sequence[Path]) -> GenerationReport:
    """Generate tasks and write them to the files of the section.

    If a process is killed, the next one continues with the cached answers. If the files are complete
    and belong to this configuration and these documents, nothing is done.

    Args:
        config: section `task_reader.data_generation`.
        base_dir: the folder of the YAML file, for relative paths that do not exist in the working directory.
        search: the folders in which to search for `package.module->function`.

    Raises:
        ConfigError: there are neither documents nor examples, or there is no key for the endpoint.
        PluginError: a package for the documents or the deduplication is missing.
        TaskDataError: a document or the examples cannot be read, or no task could be generated.
        JudgeUnavailableError, JudgeBudgetError: the endpoint has rejected all keys, or the budget is used up.
        RecordError: a file cannot be written.
    """
    chunks = read_chunks(config.document_reader, base_dir)
    examples = _examples(config, base_dir, search)
    if not chunks and not examples:
        raise ConfigError(
            "astuner.task_reader.data_generation has neither documents nor examples; set "
            "document_reader.document_path or example_path"
        )
    files = GenerationFiles(config, chunks, examples)
    if (finished := files.finished()) is not None:
        training, validation, left_out = finished
        logger.info("the generated tasks in {} are up to date", config.train_output_path)
        return GenerationReport(training, validation, left_out, files.usage, reused=True)
    client = LlmClient(config.llm, config.alien_llm_model, config.alien_llm_response_length)
    client.meter.add(files.usage)  # the budget includes the use of earlier processes
    generation = _Generation(config, client, chunks or [Chunk("examples", "")], examples, files)
    try:
        client.run(generation.run())
        counts = files.write(generation.kept, generation.left_out)
    finally:
        files.save_usage(client.meter.total)
        client.close()
    return GenerationReport(*counts, dict(generation.left_out), client.meter.total)


def generation_files(config: DataGenerationConfig, *, base_dir: Path, search: Sequence[Path]) -> DatasetFileConfig:
    """Generate tasks for a run, and return the section that reads the files; see `generate_tasks`."""
    report = generate_tasks(config, base_dir=base_dir, search=search)
    paths = [str(Path(p).expanduser().absolute()) for p in (config.train_output_path, config.validation_output_path)]
    return DatasetFileConfig(
        training=DatasetFileSplit(file_path=paths[0]),
        validation=DatasetFileSplit(file_path=paths[1] if report.validation else ""),
    )


def _examples(config: DataGenerationConfig, base_dir: Path, search: Sequence[Path]) -> list[dict[str, Any]]:
    if config.example_path is None:
        return []
    section = DatasetFileConfig(training=DatasetFileSplit(file_path=config.example_path))
    split, _ = file_splits(section, base_dir, search)
    examples = []
    for row in split.rows:
        content = row.content if isinstance(row.content, dict) else {}
        if row.problem or not all(isinstance(content.get(name), str) for name in ("question", "answer")):
            reason = row.problem or "expected an object with question and answer as strings"
            raise TaskDataError(f"{split.source}: {row.where}: {reason}.")
        examples.append({name: content[name] for name in ("question", "answer")})
    return examples


class _Generation:
    """The state of a generation.

    Attributes:
        kept: the tasks so far, in an order that does not depend on the order of the answers.
        left_out: the causes of the other tasks.
    """

    def __init__(
        self,
        config: DataGenerationConfig,
        client: LlmClient,
        chunks: Sequence[Chunk],
        examples: Sequence[Mapping[str, Any]],
        files: GenerationFiles,
    ) -> None:
        self._config, self._client, self._chunks, self._examples = config, client, chunks, examples
        self._files = files
        self._asked: dict[str, list[str]] = {chunk.source: [] for chunk in chunks}
        self._by_source = {chunk.source: chunk for chunk in chunks}
        self._last_failure = ""
        self.kept: list[Row] = []
        self.left_out: Counter[str] = Counter()

    async def run(self) -> None:
        """Generate until there are enough tasks, or each chunk was used in every round."""
        target = self._config.task_num
        for number in range(self._config.max_rounds):
            # Not more chunks at once than are needed, because every request costs.
            per_request = self._config.tasks_per_request
            start = 0
            while start < len(self._chunks) and len(self.kept) < target:
                size = max(1, -(-(target - len(self.kept)) // per_request))
                batch = self._chunks[start : start + size]
                start += size
                await self._add(batch, number)
                logger.info("generated {} of {} tasks", min(len(self.kept), target), target)
            if len(self.kept) >= target:
                break
        if len(self.kept) > target:
            self.left_out["more than task_num"] += len(self.kept) - target
            del self.kept[target:]
        if not self.kept:
            causes = describe_left_out(self.left_out) if self.left_out else "none was generated"
            raise TaskDataError(
                f"no task could be generated from {len(self._chunks)} chunks: {causes}."
                + (f" The last failure: {self._last_failure}" if self._last_failure else "")
            )
        if len(self.kept) < target:
            logger.warning("generated {} of {} tasks; add documents, or raise max_rounds", len(self.kept), target)

    async def _add(self, chunks: Sequence[Chunk], number: int) -> None:
        """Generate tasks from each of these chunks, and keep those that pass all checks."""
        lists = await asyncio.gather(*(self._generated(chunk, number) for chunk in chunks))
        rows = await self._without_duplicates([row for rows in lists for row in rows])
        if self._config.verify:
            verdicts = await asyncio.gather(*(self._fault(row) for row in rows))
            self.left_out.update(fault for fault in verdicts if fault)
            rows = [row for row, fault in zip(rows, verdicts, strict=True) if not fault]
        self.kept += await evaluate_rows(self._client, rows, self._config.filters, self.left_out)
        self._files.save_usage(self._client.meter.total)

    async def _generated(self, chunk: Chunk, number: int) -> list[Row]:
        rng = random.Random(f"{self._config.seed}|{chunk.source}|{number}")
        shown = rng.sample(list(self._examples), min(len(self._examples), self._config.examples_per_request))
        earlier = self._asked[chunk.source]
        messages = generation_request(chunk, shown, earlier, self._config.tasks_per_request)
        try:
            answer = (await self._client.ask(messages, GeneratedTasks, tasks_fault)).value
        except NoAnswer as error:
            self._failed(error, "a request for tasks")
            return []
        earlier.extend(task.question for task in answer.tasks)
        return [
            {"question": task.question.strip(), "answer": task.answer.strip(), "source": chunk.source}
            for task in answer.tasks
        ]

    async def _without_duplicates(self, rows: Sequence[Row]) -> list[Row]:
        known = [str(row["question"]) for row in (*self._examples, *self.kept)]
        questions = [*known, *(str(row["question"]) for row in rows)]
        similar = await asyncio.to_thread(similar_to_earlier, questions, self._config.deduplication, self._config.llm)
        fresh = [row for row, is_similar in zip(rows, similar[len(known) :], strict=True) if not is_similar]
        if len(fresh) < len(rows):
            self.left_out["similar to an earlier task or an example"] += len(rows) - len(fresh)
        return fresh

    async def _fault(self, row: Row) -> str | None:
        """Return the reason that a task is not verified; None if the helper model gives the same answer."""
        question, expected = str(row["question"]), str(row["answer"])
        try:
            messages = solution_request(self._by_source[str(row["source"])], question)
            solved = (await self._client.ask(messages, SolvedTask)).value
            if not solved.answerable:
                return "not answerable"
            if _words(solved.answer) == _words(expected) and _words(expected):
                return None
            compared = await self._client.ask(comparison_request(question, (expected, solved.answer)), ComparedAnswers)
        except NoAnswer as error:
            self._failed(error, "the verification of a task")
            return "not verified, because the helper model gave no usable answer"
        return None if compared.value.same else "answered differently by the verification"

    def _failed(self, error: NoAnswer, what: str) -> None:
        self._last_failure = str(error)
        logger.warning("{} failed: {}", what, error)


def _words(text: str) -> list[str]:
    return _WORDS.findall(text.lower())
