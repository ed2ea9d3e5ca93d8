"""Sections on tasks that are made from other data: `feedback_tracing` and `data_generation` of `task_reader`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from astuner.config.section import Count, FunctionPath, NonNegativeInt, Number, PositiveInt, Section, Seed, key
from astuner.config.services import JudgeLlmConfig

ValidationShare = Annotated[float, Field(ge=0, lt=1)]


class LlmEvaluateFilter(Section):
    """An entry of `filters`: keep the rows that fulfil rubrics, as judged by the helper model."""

    type: Literal["llm_evaluate"]
    """`llm_evaluate`."""
    custom_rubrics: Annotated[str, Field(min_length=1)]
    """Instructions, in words, on which questions with answers to keep and which to drop."""
    enabled: bool = True
    """Apply the filter."""


class FeedbackTracingConfig(Section):
    """`task_reader.feedback_tracing`: tasks or transcripts from the traces of a deployed agent."""

    base_url: str = key("database.sqlite", resume="path")
    """The traces: a file or the folder of a run, or `package.module->function` that returns the path."""
    feedback_path: str | None = key(None, resume="path")
    """A JSON Lines file with `trace_id` and `rating`, `edit` or `comment`; null for none."""
    train_output_path: str = key("feedback_tracing/training.jsonl", resume="path")
    """The file to which the training rows are written."""
    validation_output_path: str = key("feedback_tracing/validation.jsonl", resume="path")
    """The file to which the validation rows are written."""
    validation_share: ValidationShare = 0.1
    """Share of the rows that are for validation; 0 for none."""
    min_rating: Number | None = None
    """Leave out traces with a lower rating or without one, unless the answer was edited; null keeps all."""
    redact: FunctionPath | None = None
    """`package.module->function` that takes a text and returns it without personal data; null changes no text."""
    skip_bad_rows: bool = False
    """Skip and count rows, spans and episodes that cannot be read, instead of stopping at them."""
    filters: list[LlmEvaluateFilter] = key([])
    """Filters of the tasks or transcripts, applied in order: llm_evaluate."""
    alien_llm_model: str = "qwen3-235b-a22b-instruct-2507"
    """The helper model of the filters."""
    alien_llm_response_length: PositiveInt = 512
    """Maximum number of tokens in the helper model's answer."""
    llm: JudgeLlmConfig = JudgeLlmConfig()
    """The helper model's endpoint, and the limits of its use; as task_judge.llm."""


class DocumentReaderConfig(Section):
    """`document_reader`: the texts that the generated questions are about."""

    document_path: list[str] = key([], resume="path")
    """Files (PDF, DOCX, HTML, Markdown, text) and folders with such files."""
    chunk_size: Annotated[int, Field(ge=100, le=1_000_000)] = 4000
    """Maximum number of characters in a chunk, the document part that one request shows."""


class DeduplicationConfig(Section):
    """`deduplication`: leave out questions that are similar to an earlier one."""

    method: Literal["ngrams", "embeddings", "none"] = "ngrams"
    """ngrams: MinHash of word n-grams; embeddings: the cosine similarity of the endpoint's embeddings; or none."""
    threshold: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Minimum similarity of two questions that makes them duplicates."""
    ngram: Count = 2
    """Number of words in an n-gram."""
    embedding_model: str = "text-embedding-v4"
    """Embedding model, if method is embeddings."""


class DataGenerationConfig(Section):
    """`task_reader.data_generation`: tasks that a helper model generates from documents and example tasks."""

    document_reader: DocumentReaderConfig = DocumentReaderConfig()
    """The documents. Without documents, tasks are generated from the examples only."""
    example_path: str | None = key(None, resume="path")
    """A .jsonl, .json, .csv or .parquet file of example tasks with `question` and `answer`; null for none."""
    examples_per_request: NonNegativeInt = 3
    """Number of examples that a request shows; they are drawn at random."""
    task_num: PositiveInt = 100
    """Number of tasks to generate."""
    tasks_per_request: Annotated[int, Field(gt=0, le=100)] = 5
    """Number of tasks that a request asks for."""
    max_rounds: Count = 4
    """Maximum number of times that each document chunk is used to reach task_num."""
    verify: bool = True
    """Keep only tasks that the helper model can answer from the text, with the same answer, without knowing it."""
    deduplication: DeduplicationConfig = DeduplicationConfig()
    """Removal of similar questions."""
    filters: list[LlmEvaluateFilter] = key([])
    """Filters of the tasks, applied in order: llm_evaluate."""
    train_output_path: str = key("data_generation/training.jsonl", resume="path")
    """The file to which the training tasks are written."""
    validation_output_path: str = key("data_generation/validation.jsonl", resume="path")
    """The file to which the validation tasks are written."""
    validation_share: ValidationShare = 0.1
    """Share of the tasks for validation, from other document parts if possible; 0 for none."""
    seed: Seed = 0
    """Seed for the split and for the examples that a request shows."""
    alien_llm_model: str = "qwen3-235b-a22b-instruct-2507"
    """The helper model that generates and verifies."""
    alien_llm_response_length: PositiveInt = 2048
    """Maximum number of tokens in the helper model's answer."""
    llm: JudgeLlmConfig = JudgeLlmConfig()
    """The helper model's endpoint, and the limits of its use; as task_judge.llm."""
