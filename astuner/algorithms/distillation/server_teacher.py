"""A teacher behind an OpenAI-compatible server that returns the log-probabilities of prompts, such as vLLM."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import httpx
import numpy as np
from numpy.typing import NDArray

from astuner.algorithms.distillation.teacher import TeacherSequence
from astuner.errors import ModelError, first_line, shorten

_KEY = "trainer_common.distillation.teacher"
_REQUESTS = 8
_RETRIES = 2


class ServerTeacher:
    """Scores tokens with the completions API of a server.

    The server must accept token ids as prompts and return `prompt_logprobs`, as vLLM does.
    """

    def __init__(self, client: httpx.Client, model: str) -> None:
        """Use a server.

        Args:
            client: a client whose base URL has the API version, such as `http://127.0.0.1:8000/v1`.
            model: the model's name on the server.
        """
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
                    f"{_KEY} ({url}) serves {', '.join(names) or 'no models'}; set "
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
                f"folder of a model as {_KEY}"
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
                f"{_KEY} ({self._client.base_url}) returned {len(scores)} prompt_logprobs for a prompt of "
                f"{len(sequence.token_ids)} tokens; expected one for each token, as vLLM returns them"
            )
        result = np.zeros(len(sequence.token_ids), np.float32)
        for start, end in sequence.spans:
            for place in range(start, end):
                result[place] = self._logprob(scores[place], int(sequence.token_ids[place]))
        return result

    def _logprob(self, entry: Mapping[str, Any] | None, token: int) -> float:
        value = ((entry or {}).get(str(token)) or {}).get("logprob")
        if not isinstance(value, int | float) or math.isnan(value):
            raise ModelError(
                f"{_KEY} ({self._client.base_url}) returned no log-probability of token {token}: "
                f"{shorten(str(entry), 200)}; expected an entry as vLLM returns it"
            )
        return value

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        name = f"{_KEY} ({self._client.base_url})"
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
