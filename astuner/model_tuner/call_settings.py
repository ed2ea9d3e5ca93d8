"""The run's LLM call settings, and their combination with a request's parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from astuner.errors import ContextLengthError, UnsupportedParameterError
from astuner.model_tuner.chat_options import ChatOptions

SAMPLING_PARAMETERS = ("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty")
"""The parameters of the distribution that tokens are sampled from."""


@dataclass(frozen=True, slots=True)
class CallSettings:
    """Settings for an episode's LLM calls, from `rollout` and `data` of the configuration; lengths are in tokens.

    `client_sampling` is `honour` or `override` (see `rollout.client_sampling`). `fixed_sampling` has the names of the
    parameters in which trained calls cannot differ from the run's settings. With `seeds_by_prompt`, a call's seed
    depends on its prompt, and otherwise on the number of calls before it, which concurrent calls may change.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 512
    max_model_len: int = 4096
    max_prompt_length: int = 4096
    max_response_length: int = 4096
    max_calls: int = 30
    disable_tools: bool = False
    madness_checklist: tuple[str, ...] = ()
    madness_ends_episode: bool = True
    client_sampling: Literal["honour", "override"] = "honour"
    fixed_sampling: tuple[str, ...] = ()
    seeds_by_prompt: bool = False

    def distribution(self, options: ChatOptions, *, trained: bool) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return a call's values for `SAMPLING_PARAMETERS`, and the names of the request's values that were replaced.

        Args:
            options: the parameters of the request.
            trained: whether the call is trained.

        Raises:
            UnsupportedParameterError: a trained call requests a value that the backbone cannot train.
        """
        run = {"presence_penalty": 0.0, "frequency_penalty": 0.0}
        run |= {name: getattr(self, name) for name in ("temperature", "top_p", "top_k")}
        client = {name: getattr(options, name) for name in SAMPLING_PARAMETERS}
        changed = {name: value for name, value in client.items() if value is not None and value != run[name]}
        if self.client_sampling == "override":
            return run, (*changed, *(["seed"] if options.seed is not None else []))
        for name, value in changed.items():
            if trained and name in self.fixed_sampling:
                raise UnsupportedParameterError(
                    f"the request has {name}={value!r}, but this backbone trains calls with the run's {name} only, "
                    f"which is {run[name]!r}: send this value or none, or set rollout.client_sampling: override to "
                    "replace the values of requests",
                    name,
                )
        return run | changed, ()

    def max_answer_tokens(self, prompt_len: int, first_prompt_len: int | None, engine_max_model_len: int) -> int:
        """Return the number of tokens that an answer may have.

        Args:
            prompt_len: the length of the prompt.
            first_prompt_len: the length of the first prompt of the conversation; None if this is the first one.
            engine_max_model_len: the limit of the engine for prompt and answer together.

        Raises:
            ContextLengthError: the prompt is longer than configured, or leaves no room for an answer.
        """
        if first_prompt_len is None and prompt_len > self.max_prompt_length:
            raise ContextLengthError(
                f"the first prompt has {prompt_len} tokens, but data.max_prompt_length is {self.max_prompt_length}; "
                "raise data.max_prompt_length, or shorten the prompt"
            )
        first = prompt_len if first_prompt_len is None else first_prompt_len
        room = {
            "rollout.max_model_len": self.max_model_len - prompt_len,
            "the model's context length": engine_max_model_len - prompt_len,
            "data.max_response_length": first + self.max_response_length - prompt_len,
        }
        limit = min(room, key=lambda name: room[name])
        if room[limit] < 1:
            more = f"raise {limit}" if "." in limit else "use a model with a longer context"
            raise ContextLengthError(
                f"a prompt of {prompt_len} tokens leaves no room for an answer within {limit}; "
                f"{more}, or keep the agent's history shorter"
            )
        return min(room[limit], self.max_tokens)
