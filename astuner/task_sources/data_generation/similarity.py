"""Finds questions that are similar to earlier ones."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from astuner.config.llm_judge import JudgeLlmConfig
from astuner.config.task_selection import DuplicateFilter
from astuner.config.task_sources import DeduplicationConfig
from astuner.errors import ServiceError, first_line
from astuner.helper_llm.cache import AnswerCache, default_cache_folder, question_hash
from astuner.helper_llm.keys import ApiKeys
from astuner.schema import Task
from astuner.system.redaction import redact
from astuner.task_reader.filters import find_duplicates

_EMBEDDINGS_PER_REQUEST = 64


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
    """Return the normalised embeddings of texts; those of earlier requests are in the cache."""
    keys = ApiKeys.from_environment(llm)
    cache = AnswerCache(Path(llm.cache_dir) if llm.cache_dir else default_cache_folder())
    try:
        hashes = {text: question_hash({"url": keys.base_url, "embedding": model, "text": text}) for text in texts}
        missing = [text for text, key in hashes.items() if cache.get(key) is None]
        for start in range(0, len(missing), _EMBEDDINGS_PER_REQUEST):
            batch = missing[start : start + _EMBEDDINGS_PER_REQUEST]
            for text, vector in zip(batch, _requested(batch, model, llm, keys), strict=True):
                cache.put(hashes[text], json.dumps(vector))
        return [_normalised(json.loads(cache.get(hashes[text]) or "[]")) for text in texts]
    finally:
        cache.close()


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


def _normalised(vector: list[float]) -> list[float]:
    length = math.sqrt(sum(value * value for value in vector)) or 1.0
    return [value / length for value in vector]
