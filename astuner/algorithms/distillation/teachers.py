"""Teachers, which return the log-probabilities of token sequences: a model in this process, or one on a server."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, Self

import httpx
import numpy as np
import torch
from numpy.typing import NDArray

from astuner.config.algorithm_settings import TEACHER_KEY
from astuner.errors import ModelError, first_line, shorten
from astuner.llm_engine.context_length import context_length

_REQUESTS = 8
_RETRIES = 2


@dataclass(frozen=True, slots=True)
class TeacherSequence:
    """A token sequence, and the parts of it that the teacher scores.

    Attributes:
        token_ids: N token ids.
        spans: (start, end) of each part, with 1 <= start < end <= N.
        temperatures: the sampling temperature of each part; 0 is greedy sampling, which is scored as temperature 1.
    """

    token_ids: Sequence[int] | NDArray[np.int32]
    spans: Sequence[tuple[int, int]]
    temperatures: Sequence[float]


class Teacher(Protocol):
    """A model that scores tokens."""

    def logprobs(self, sequences: Sequence[TeacherSequence]) -> list[NDArray[np.float32]]:
        """Return the log-probability of each token in the spans, given the tokens before it.

        Args:
            sequences: S sequences.

        Returns:
            S arrays, each [N] with the length of its sequence, and 0 outside its spans.

        Raises:
            ModelError: the teacher cannot score the sequences.
        """
        ...

    def close(self) -> None:
        """Free the teacher's resources."""
        ...


class ModelTeacher:
    """Scores tokens with a causal language model of transformers.

    Args:
        model: the model. It is used as it is at each call, so a model in training is its own teacher.
        max_tokens: padded tokens of one forward pass; a longer sequence is computed alone.
        autocast: returns the context of the forward passes.
    """

    def __init__(
        self,
        model: Any,
        max_tokens: int,
        autocast: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self._model = model
        self._max_tokens = max_tokens
        self._autocast = autocast

    def logprobs(self, sequences: Sequence[TeacherSequence]) -> list[NDArray[np.float32]]:
        """Score the spans (see `Teacher.logprobs`).

        Raises:
            ModelError: a sequence is longer than the model's context, or has a token that the model does not have.
        """
        for sequence in sequences:
            limit, length = context_length(self._model.config), len(sequence.token_ids)
            if limit is not None and length > limit:
                raise ModelError(
                    f"{TEACHER_KEY} has a context of {limit} tokens, and a sequence to score has "
                    f"{length}; name a teacher with a longer context, or lower rollout.max_model_len"
                )
            size = self._model.get_input_embeddings().num_embeddings
            if (largest := max(sequence.token_ids)) >= size:
                raise ModelError(
                    f"{TEACHER_KEY} has {size} token ids, and a sequence to score has the id "
                    f"{largest}; name a teacher with the tokenizer of model.path"
                )
        results = [np.zeros(len(sequence.token_ids), np.float32) for sequence in sequences]
        was_training = self._model.training
        self._model.eval()
        try:
            with torch.no_grad(), self._autocast():
                for batch in self._batches(sequences):
                    self._score([sequences[index] for index in batch], [results[index] for index in batch])
        finally:
            self._model.train(was_training)
        return results

    def close(self) -> None:
        """Drop the model."""
        self._model = None

    def _batches(self, sequences: Sequence[TeacherSequence]) -> Iterator[list[int]]:
        """Yield the indexes of similarly long sequences, as many as fit into one forward pass."""
        batch: list[int] = []
        for index in sorted(range(len(sequences)), key=lambda index: -len(sequences[index].token_ids)):
            # The first sequence of a batch is its longest one.
            if batch and (len(batch) + 1) * len(sequences[batch[0]].token_ids) > self._max_tokens:
                yield batch
                batch = []
            batch.append(index)
        if batch:
            yield batch

    def _score(self, sequences: Sequence[TeacherSequence], results: Sequence[NDArray[np.float32]]) -> None:
        width = max(len(sequence.token_ids) for sequence in sequences)
        # Padding is on the right, so no token of a sequence attends to it.
        token_ids = np.zeros((len(sequences), width), np.int64)
        scored = np.zeros((len(sequences), width), bool)
        temperatures = np.ones((len(sequences), width), np.float32)
        for index, sequence in enumerate(sequences):
            token_ids[index, : len(sequence.token_ids)] = sequence.token_ids
            for (start, end), temperature in zip(sequence.spans, sequence.temperatures, strict=True):
                scored[index, start:end] = True
                temperatures[index, start:end] = temperature or 1.0
        rows, columns = scored.nonzero()
        needed, places = np.unique(columns - 1, return_inverse=True)
        device = self._model.get_input_embeddings().weight.device
        logits = self._model(
            input_ids=torch.from_numpy(token_ids).to(device),
            logits_to_keep=torch.from_numpy(needed).to(device),
            use_cache=False,
        ).logits
        chosen = logits[torch.from_numpy(rows).to(device), torch.from_numpy(places).to(device)].float()
        chosen = chosen / torch.from_numpy(temperatures[rows, columns]).to(device)[:, None]
        targets = torch.from_numpy(token_ids[rows, columns]).to(device)
        logprobs = -torch.nn.functional.cross_entropy(chosen, targets, reduction="none")
        for row, column, value in zip(rows.tolist(), columns.tolist(), logprobs.tolist(), strict=True):
            results[row][column] = value


class ServerTeacher:
    """Scores tokens with the completions API of a server.

    The server must accept token ids as prompts and return `prompt_logprobs`, as vLLM does.

    Args:
        client: a client whose base URL has the API version, such as `http://127.0.0.1:8000/v1`.
        model: the model's name on the server.
    """

    def __init__(self, client: httpx.Client, model: str) -> None:
        self._client = client
        self._model = model
        self._threads = ThreadPoolExecutor(_REQUESTS, thread_name_prefix="teacher")

    @classmethod
    def connect(cls, url: str, *, model: str | None, api_key: str | None, timeout: float) -> Self:
        """Find the model on the server, and score two tokens to check that the response is complete.

        Args:
            url: the address of the server, with or without the API version.
            model: the model's name on the server; None is the only model that it serves.
            api_key: bearer token, or None.
            timeout: time limit of a request in seconds.

        Raises:
            ModelError: the server cannot be reached, rejects the key, lacks the model, or returns no log-probabilities.
        """
        base = url.rstrip("/")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        client = httpx.Client(
            base_url=base if base.endswith("/v1") else f"{base}/v1",
            headers=headers,
            timeout=timeout,
            transport=httpx.HTTPTransport(retries=_RETRIES),
        )
        teacher = cls(client, model or "")
        try:
            names = [str(entry.get("id")) for entry in teacher._request("GET", "/models").get("data") or []]
            if model is None and len(names) == 1:
                teacher._model = names[0]
            elif model not in names:
                raise ModelError(
                    f"{TEACHER_KEY} ({url}) serves {', '.join(names) or 'no models'}; set "
                    f"trainer_common.distillation.teacher_model to one of them (it is {model!r})"
                )
            teacher.logprobs([TeacherSequence((0, 0), [(1, 2)], [1.0])])
        except BaseException:
            teacher.close()
            raise
        return teacher

    def logprobs(self, sequences: Sequence[TeacherSequence]) -> list[NDArray[np.float32]]:
        """Score the spans (see `Teacher.logprobs`).

        Raises:
            ModelError: the server does not answer, or its answer has no log-probability of a token; or a part was
                sampled with another temperature than 1, for which servers return no prompt log-probabilities.
        """
        return list(self._threads.map(self._score, sequences))

    def close(self) -> None:
        """Close the connections."""
        self._threads.shutdown()
        self._client.close()

    def _score(self, sequence: TeacherSequence) -> NDArray[np.float32]:
        if other := {value for value in sequence.temperatures if value not in (0.0, 1.0)}:
            raise ModelError(
                f"a call was sampled at temperature {min(other):g}, and a teacher behind a server scores tokens at "
                "temperature 1 only; write rollout.temperature: 1.0 and leave it out of the requests, or name the "
                f"folder of a model as {TEACHER_KEY}"
            )
        body = {
            "model": self._model,
            "prompt": [int(token) for token in sequence.token_ids],
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 0,
        }
        answer = self._request("POST", "/completions", body)
        choices = answer.get("choices") or [{}]
        scores = choices[0].get("prompt_logprobs") or answer.get("prompt_logprobs") or []
        if len(scores) != len(sequence.token_ids):
            raise ModelError(
                f"{TEACHER_KEY} ({self._client.base_url}) returned {len(scores)} prompt_logprobs for a prompt of "
                f"{len(sequence.token_ids)} tokens; expected one for each token, as vLLM returns them"
            )
        result = np.zeros(len(sequence.token_ids), np.float32)
        for start, end in sequence.spans:
            for place in range(start, end):
                entry, token = scores[place], int(sequence.token_ids[place])
                value = ((entry or {}).get(str(token)) or {}).get("logprob")
                if not isinstance(value, int | float) or math.isnan(value):
                    raise ModelError(
                        f"{TEACHER_KEY} ({self._client.base_url}) returned no log-probability of token {token}: "
                        f"{shorten(str(entry), 200)}; expected an entry as vLLM returns it"
                    )
                result[place] = value
        return result

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        name = f"{TEACHER_KEY} ({self._client.base_url})"
        try:
            response = self._client.request(method, path.lstrip("/"), json=body)
        except httpx.HTTPError as error:
            raise ModelError(
                f"{name} did not answer {method} {path}: {first_line(error)}; start the "
                "server, or raise trainer_common.distillation.request_timeout"
            ) from error
        if response.is_error:
            raise ModelError(
                f"{name} answered {method} {path} with status {response.status_code}: {shorten(response.text, 300)}"
            )
        try:
            answer = response.json()
        except ValueError as error:
            raise ModelError(f"{name} answered {method} {path} with text that is not JSON") from error
        if not isinstance(answer, dict):
            raise ModelError(f"{name} answered {method} {path} with {type(answer).__name__}, expected a JSON object")
        return answer
