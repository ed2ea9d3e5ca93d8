"""Generates tasks with a helper model, verifies, filters and deduplicates them, and writes them to files."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import Any

from loguru import logger

from astuner.config.data import DatasetFileConfig, DatasetFileSplit
from astuner.config.services import JudgeLlmConfig
from astuner.config.task_selection import DuplicateFilter
from astuner.config.task_sources import DataGenerationConfig, DeduplicationConfig
from astuner.errors import ConfigError, ServiceError, TaskDataError, first_line
from astuner.helper_llm.cache import AnswerCache, default_cache_folder, question_hash
from astuner.helper_llm.client import LlmClient, NoAnswer
from astuner.helper_llm.keys import ApiKeys
from astuner.helper_llm.usage import LlmUsage
from astuner.run_record.files import dump_json, write_atomically
from astuner.schema import Task
from astuner.system.redaction.redactor import redact
from astuner.task_reader.dataset_file import file_splits
from astuner.task_reader.filters import find_duplicates
from astuner.task_reader.reader import describe_left_out
from astuner.task_sources.data_generation.questions import (
    Chunk,
    ComparedAnswers,
    GeneratedTasks,
    Row,
    SolvedTask,
    comparison_request,
    evaluate_rows,
    generation_request,
    read_chunks,
    solution_request,
    tasks_fault,
)

_STATE_SUFFIX = ".state.json"
# Keys that do not change which tasks are generated.
_IRRELEVANT = {"llm", "train_output_path", "validation_output_path", "document_reader", "example_path"}
_WORDS = re.compile(r"\w+")
_EMBEDDINGS_PER_REQUEST = 64


class GenerationFiles:
    """The files of one generation: the tasks, and a state that contains their completeness and cost.

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
        # The state of an earlier process with the same configuration and documents.
        state: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            earlier = json.loads(self._state.read_bytes())
            if isinstance(earlier, dict) and earlier.get("fingerprint") == self._fingerprint:
                state = earlier
        has_files = self._training.is_file() and (self._validation.is_file() or not config.validation_share)
        self._result = state.get("result") if has_files else None
        known = {field.name for field in fields(LlmUsage)}
        self.usage = LlmUsage(**{name: value for name, value in state.get("usage", {}).items() if name in known})

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


@dataclass(frozen=True, slots=True)
class GenerationReport:
    """The result of a generation.

    Attributes:
        training, validation: the numbers of tasks.
        left_out: the numbers of generated tasks that were left out, by cause.
        usage: the helper model's use in all processes that worked on the tasks.
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

    Relative paths that do not exist in the working directory start from `base_dir`, the YAML file's folder, and
    `package.module->function` is searched for in `search`.

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
        rows = [row for rows in lists for row in rows]
        known = [str(row["question"]) for row in (*self._examples, *self.kept)]
        questions = [*known, *(str(row["question"]) for row in rows)]
        similar = await asyncio.to_thread(similar_to_earlier, questions, self._config.deduplication, self._config.llm)
        if repeated := sum(similar[len(known) :]):
            self.left_out["similar to an earlier task or an example"] += repeated
            rows = [row for row, is_similar in zip(rows, similar[len(known) :], strict=True) if not is_similar]
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


def similar_to_earlier(questions: Sequence[str], config: DeduplicationConfig, llm: JudgeLlmConfig) -> list[bool]:
    """Return for each question whether it is similar to an earlier one that is not itself a duplicate.

    Raises:
        PluginError: datasketch is not installed.
        ServiceError: the endpoint returns no embeddings.
    """
    if config.method == "none":
        return [False] * len(questions)
    if config.method == "ngrams":
        tasks = [Task(str(number), question) for number, question in enumerate(questions)]
        entry = DuplicateFilter(type="deduplicate", threshold=config.threshold, ngram=config.ngram)
        return [cause is not None for cause in find_duplicates(tasks, entry)]
    kept: list[list[float]] = []
    duplicates = []
    for vector in _embeddings(questions, config.embedding_model, llm):
        is_duplicate = any(sum(map(float.__mul__, vector, other)) >= config.threshold for other in kept)
        duplicates.append(is_duplicate)
        kept += [] if is_duplicate else [vector]
    return duplicates


def _embeddings(texts: Sequence[str], model: str, llm: JudgeLlmConfig) -> list[list[float]]:
    """Return the normalised embeddings of texts; earlier requests are in the cache."""
    keys = ApiKeys.from_environment(llm)
    cache = AnswerCache(Path(llm.cache_dir) if llm.cache_dir else default_cache_folder())
    try:
        hashes = {text: question_hash({"url": keys.base_url, "embedding": model, "text": text}) for text in texts}
        missing = [text for text, key in hashes.items() if cache.get(key) is None]
        for start in range(0, len(missing), _EMBEDDINGS_PER_REQUEST):
            batch = missing[start : start + _EMBEDDINGS_PER_REQUEST]
            for text, vector in zip(batch, _requested(batch, model, llm, keys), strict=True):
                cache.put(hashes[text], json.dumps(vector))
        vectors: list[list[float]] = [json.loads(cache.get(hashes[text]) or "[]") for text in texts]
    finally:
        cache.close()
    lengths = [math.sqrt(sum(value * value for value in vector)) or 1.0 for vector in vectors]
    return [[value / length for value in vector] for vector, length in zip(vectors, lengths, strict=True)]


def _requested(texts: Sequence[str], model: str, llm: JudgeLlmConfig, keys: ApiKeys) -> list[list[float]]:
    from openai import OpenAI, OpenAIError

    try:
        with OpenAI(
            base_url=keys.base_url, api_key=keys.choose(), max_retries=llm.max_retries, timeout=llm.request_timeout
        ) as client:
            answer = client.embeddings.create(model=model, input=list(texts), encoding_format="float")
        vectors = [[float(value) for value in item.embedding] for item in sorted(answer.data, key=lambda i: i.index)]
        if len(vectors) != len(texts):
            raise ValueError(f"{len(vectors)} embeddings for {len(texts)} texts")
    # A server of another kind can answer anything, which the client cannot parse.
    except (OpenAIError, ValueError, TypeError, AttributeError) as error:
        raise ServiceError(
            redact(f"{model} at {keys.base_url} returns no embeddings: {first_line(error)}; ")
            + "set deduplication.embedding_model, or deduplication.method to ngrams"
        ) from error
    return vectors
