"""ModelTuner: the chat model that a workflow gives to its agents."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from astuner.errors import (
    AgentMadness,
    CallLimitError,
    EpisodeError,
    EpisodeStopped,
    UnsupportedParameterError,
)
from astuner.llm_engine.protocol import LlmEngine
from astuner.model_tuner.anomaly_checks import CheckedAnswer, find_anomaly
from astuner.model_tuner.answers import AnswerForms, ChatAnswer, as_message, check_enforced, cut_at_stop, gather_answers
from astuner.model_tuner.chat_options import CallSettings, ChatOptions
from astuner.model_tuner.codec import ChatCodec, ParsedAnswer
from astuner.model_tuner.framework_adapters import AgentModel, FrameworkAdapters
from astuner.model_tuner.history import History, HistoryEdit, OpenCall, Prompt, RawPrompt
from astuner.model_tuner.messages import normalise, shown_tools, tools_hash
from astuner.model_tuner.targets import (
    DEFAULT_TARGET,
    DebugModel,
    ExternalAnswer,
    FrozenModel,
    Targets,
    call_debug_model,
    call_endpoint,
)
from astuner.schema import Anomaly, Completion, LlmCall, Messages, SamplingParams, Tools
from astuner.system.clock import timestamp

if TYPE_CHECKING:
    from astuner.gateway.http_server import Gateway
    from astuner.model_tuner.remote import RemoteModelTuner


class ModelTuner(FrameworkAdapters):
    """The model in training, for one episode; pass it to an agent as its model.

    AgentScope agents accept it directly (`ReActAgent(model=model_tuner, …)`). Methods such as `as_langchain_chat_model`
    return it for other frameworks, and other code calls `chat`. Every call is recorded token-exactly in `calls`.

    Args:
        engine: samples tokens.
        codec: converts messages to ids and back.
        settings: sampling parameters and lengths.
        episode_id: recorded with each call.
        seed: makes the sampling of the episode reproducible.
        targets: the agents of the workflow that are trained; None for all.
        on_call: called with each finished call.
        endpoints: serves the model over HTTP; None if it is not served.
    """

    def __init__(
        self,
        engine: LlmEngine,
        codec: ChatCodec,
        settings: CallSettings,
        *,
        episode_id: str,
        seed: int = 0,
        targets: Targets | None = None,
        on_call: Callable[[LlmCall], None] | None = None,
        endpoints: Gateway | None = None,
    ) -> None:
        self.model_name = "astuner"
        self.anomaly: Anomaly | None = None
        self.call_limit_error: CallLimitError | None = None
        # The error of the last request through an API; None if it succeeded. The workflow sees an error of its client.
        self.rejection: EpisodeError | None = None
        self.replaced_parameters: Counter[str] = Counter()
        self._engine = engine
        self._codec = codec
        self._forms = AnswerForms(codec)
        self._settings = settings
        self._seed = seed
        self._targets = targets or Targets()
        self._endpoints = endpoints
        self._history = History(codec, episode_id, on_call)
        # Of `_calls_started` and `_calls_by_prompt`: a gateway calls the model in its own thread.
        self._lock = threading.Lock()
        self._calls_started = 0
        self._calls_by_prompt: Counter[tuple[int, ...]] = Counter()
        self._rejected_calls = 0
        self._open_calls: dict[OpenCall, None] = {}
        self._pid = os.getpid()

    @property
    def open_calls(self) -> tuple[OpenCall, ...]:
        """The calls that have no answer yet. Thread-safe."""
        return tuple(self._open_calls.copy())

    @property
    def calls(self) -> tuple[LlmCall, ...]:
        """The calls that have ended, in order of completion, including those that were cut."""
        return tuple(self._history.calls)

    def for_agent(
        self, agent_name: str, target_tag: str = DEFAULT_TARGET, debug_model: DebugModel | None = None
    ) -> AgentModel:
        """Return the model for one of several agents.

        Args:
            agent_name: recorded with the agent's calls; rewards by agent use it as their key.
            target_tag: the agent's name in `rollout.trainable_targets` and `rollout.frozen_models`.
            debug_model: an AgentScope chat model that answers if the target is not trained.
        """
        return AgentModel(self, agent_name, target_tag, debug_model)

    @property
    def names_of_trained_model(self) -> tuple[str, ...]:
        """The names by which a request through an API can call the model in training."""
        return (self.model_name,) if self._endpoints is None else self._endpoints.names_of_trained_model

    @property
    def forwarded_models(self) -> tuple[str, ...]:
        """The tags of the targets whose calls go to another endpoint."""
        return tuple(tag for tag, model in self._targets.frozen.items() if model.base_url is not None)

    def decode_token(self, token: int) -> str:
        """Return the text of a token."""
        return self._codec.decode([token])

    def count_prompt_tokens(self, messages: Messages, tools: Tools | None) -> int:
        """Return the number of tokens in a request's prompt. For the errors, see `chat`."""
        shown = None if self._settings.disable_tools else shown_tools(tools)
        return len(self._history.prompt(normalise(messages), shown, tools_hash(shown)).token_ids)

    def _remote(self) -> RemoteModelTuner:
        from astuner.model_tuner.remote import RemoteModelTuner

        return RemoteModelTuner(*self._open_endpoint("", DEFAULT_TARGET, None, issues_keys=True), self.model_name)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._remote().__reduce__()

    def mark_cut(self, call: LlmCall) -> None:
        """Mark a finished call as one whose answer did not reach the agent, so that it is not trained."""
        self._history.mark_cut(call)

    async def chat(
        self,
        messages: Messages,
        *,
        tools: Tools | None = None,
        agent_name: str = "",
        target_tag: str = DEFAULT_TARGET,
        debug_model: DebugModel | None = None,
        history_edit: HistoryEdit | None = None,
        **parameters: Any,
    ) -> ChatAnswer:
        """Sample one assistant turn from the model in training or, for a frozen target, from its model.

        Args:
            messages: the conversation, in OpenAI's format.
            tools: OpenAI tool definitions.
            agent_name, target_tag, debug_model: as in `for_agent`; for the agent name `auto`, see `Targets.agent_of`.
            history_edit: how the caller has changed the history since the last call; None if it has not, or if the
                change is to be found by comparison.
            parameters: parameters of OpenAI's API: `temperature`, `top_p`, `max_tokens` (a tighter limit than the
                configured one), `stop`, `seed`, `presence_penalty`, `frequency_penalty`, `n`, `logprobs`,
                `top_logprobs`, `tool_choice`, `parallel_tool_calls` and `response_format`; and `top_k`. A parameter
                that is None or missing has the run's value. With `n`, each answer is a separate call.
                With `rollout.client_sampling: override`, the run's temperature, top_p, top_k, penalties and seeds
                replace those of the request. A frozen target's model receives all parameters.

        Raises:
            WorkflowError: the messages are invalid, the chat template rejects them, or a frozen target has no model or
                a model that does not answer.
            InvalidRequestError: a parameter is invalid.
            UnsupportedParameterError: a parameter cannot be honoured by the engine or the trainer.
            ContextLengthError: the prompt is longer than configured, or leaves no room for an answer.
            CallLimitError: the episode made too many calls.
            EpisodeStopped: the workflow has caught `CallLimitError` several times.
            AgentMadness: the output is degenerate and the configuration ends the episode.
        """
        if os.getpid() != self._pid:  # a fork has a copy of this object, whose calls would not be recorded
            arguments = {"tools": tools, "agent_name": agent_name, "target_tag": target_tag, **parameters}
            return await self._remote().chat(messages, debug_model=debug_model, **arguments)
        if self._settings.disable_tools:
            tools = None
            parameters = {**parameters, "tool_choice": None}
        options = ChatOptions.parse(parameters, tools)
        agent_name, target_tag = self._targets.agent_of(messages, agent_name, target_tag)
        trained = self._targets.trains(target_tag)
        model = FrozenModel() if trained else self._targets.frozen_model(target_tag, debug_model)
        samples = isinstance(model, FrozenModel) and model.base_url is None
        if samples:
            options.reject_unknown()
        await self._start_calls(options.n)
        call_fields: dict[str, Any] = {
            "agent_name": agent_name,
            "target_tag": target_tag,
            "tools_hash": tools_hash(shown_tools(tools)),
            "trained": trained,
            "start_time": timestamp(),
        }
        try:
            if not samples:
                return await self._ask_external(model, messages, tools, options, call_fields)
            answers = await self._sample(messages, tools, options, call_fields, history_edit)
        except UnsupportedParameterError:
            with self._lock:
                self._calls_started -= options.n  # nothing was sampled
            raise
        return self._checked(answers)

    async def _sample(
        self,
        messages: Messages,
        tools: Tools | None,
        options: ChatOptions,
        call_fields: Mapping[str, Any],
        edit: HistoryEdit | None,
    ) -> list[ChatAnswer]:
        """Return answers of the model in training."""
        if isinstance(messages, RawPrompt):
            prompt = Prompt(self._codec.encode(messages.content), messages)
        else:
            prompt = self._history.prompt(normalise(messages), shown_tools(tools), call_fields["tools_hash"], edit)
        params = self._sampling(prompt, options, tools, trained=call_fields["trained"])
        params = replace(params, weights=self._targets.weights(call_fields["target_tag"]))
        seeds = [self._call_seed(options, index, prompt.token_ids) for index in range(options.n)]
        requests = [replace(params, seed=seed) for seed in seeds]
        with self._track_open(prompt, options.n, {**call_fields, "sampling": params}):
            completions = await gather_answers(
                [self._engine.generate(prompt.token_ids, request) for request in requests]
            )
        callable_tools = None if options.tool_choice == "none" else tools
        return [
            self._record_answer(prompt, request, completion, callable_tools, call_fields)
            for request, completion in zip(requests, completions, strict=True)
        ]

    def _checked(self, answers: Sequence[ChatAnswer]) -> ChatAnswer:
        """Return the first answer with the others as alternatives, unless one is degenerate or has the wrong form."""
        for answer in answers:
            self._check_degenerate(answer)
        try:
            for answer in answers:
                check_enforced(answer)
        except UnsupportedParameterError:
            for answer in answers:  # the agent gets an error instead
                self.mark_cut(answer.call)
            raise
        return replace(answers[0], alternatives=tuple(answers[1:]))

    def _record_answer(
        self,
        prompt: Prompt,
        params: SamplingParams,
        completion: Completion,
        callable_tools: Tools | None,
        call_fields: Mapping[str, Any],
    ) -> ChatAnswer:
        cut = cut_at_stop(completion, params, self._codec.stop_token_ids, self._codec.tokenizer)
        if isinstance(prompt.messages, RawPrompt):
            text_ids = cut.text_ids if cut.stop_string is not None else cut.text_ids[: cut.text_tokens]
            parsed = ParsedAnswer(self._codec.decode(text_ids))
        else:
            parsed = self._codec.parse(cut.text_ids, prompt.token_ids, callable_tools)
        call = self._history.record(prompt, cut.completion, as_message(parsed), sampling=params, **call_fields)
        return ChatAnswer(parsed, call, cut.stop_string, cut.completion.top_logprobs, text_tokens=cut.text_tokens)

    async def _ask_external(
        self,
        model: FrozenModel | DebugModel,
        messages: Messages,
        tools: Tools | None,
        options: ChatOptions,
        call_fields: Mapping[str, Any],
    ) -> ChatAnswer:
        """Return the answers from a frozen target's model."""
        if options.logprobs:
            raise UnsupportedParameterError(
                f"logprobs is supported for the model in training only, and target {call_fields['target_tag']!r} has "
                "another model; leave it out",
                "logprobs",
            )
        if isinstance(messages, RawPrompt):
            raise UnsupportedParameterError("only the model in training continues a prompt; use chat", "prompt")
        parameters = {name: value for name, value in options.given.items() if name != "n"}
        prompt = Prompt((), normalise(messages))

        async def ask() -> ExternalAnswer:
            if isinstance(model, FrozenModel):
                return await call_endpoint(model, call_fields["target_tag"], prompt.messages, tools, parameters)
            return await call_debug_model(model, messages, tools, parameters)

        with self._track_open(prompt, options.n, call_fields):
            received = await gather_answers([ask() for _ in range(options.n)])
        answers = []
        for parsed, reason, usage in received:
            call = self._history.record(prompt, Completion((), (), reason), as_message(parsed), **call_fields)
            answers.append(ChatAnswer(parsed, call, usage=usage))
        return replace(answers[0], alternatives=tuple(answers[1:]))

    @contextlib.contextmanager
    def _track_open(self, prompt: Prompt, count: int, call_fields: Mapping[str, Any]) -> Iterator[None]:
        """Register an open call. If it is cancelled, record `count` calls that were cut."""
        agent_name, target_tag, start_time = (call_fields[name] for name in ("agent_name", "target_tag", "start_time"))
        call = OpenCall(agent_name, target_tag, start_time, len(prompt.token_ids) or None)
        self._open_calls[call] = None
        try:
            yield
        except asyncio.CancelledError:
            fields = {**call_fields, "trained": False, "cut": True}
            for _ in range(count):
                self._history.record(prompt, Completion((), (), "length"), None, **fields)
            raise
        finally:
            del self._open_calls[call]

    async def _start_calls(self, count: int) -> None:
        """Count the episode's new calls, or raise the call limit's error."""
        with self._lock:
            started = self._calls_started
            if started + count <= self._settings.max_calls:
                self._calls_started += count
                return
        if self.call_limit_error is None:
            self.call_limit_error = CallLimitError(
                f"the episode started LLM call {started + count}, but rollout.multi_turn.max_steps is "
                f"{self._settings.max_calls}; raise max_steps, or limit the agent's own loop"
            )
        self._rejected_calls += 1
        if self._rejected_calls <= _MAX_CALL_LIMIT_ERRORS:
            raise self.call_limit_error
        if self._rejected_calls > 2 * _MAX_CALL_LIMIT_ERRORS:
            # The workflow catches everything. Waiting lets the episode's deadline end it without using the processor.
            await asyncio.Event().wait()
        raise EpisodeStopped(str(self.call_limit_error))

    def _sampling(self, prompt: Prompt, options: ChatOptions, tools: Tools | None, *, trained: bool) -> SamplingParams:
        """Return the sampling parameters of a call, without its seed."""
        settings = self._settings
        distribution, replaced = settings.distribution(options, trained=trained)
        self.replaced_parameters.update(replaced)
        room = settings.max_answer_tokens(len(prompt.token_ids), prompt.first_prompt_len, self._engine.max_model_len)
        max_tokens = min(room, options.max_tokens or room)
        return SamplingParams(
            **distribution,
            max_tokens=max_tokens,
            stop_token_ids=self._forms.stop_ids(options, tools),
            stop=options.stop,
            top_logprobs=options.top_logprobs,
            constraint=self._forms.constraint(options, tools, prompt.token_ids, max_tokens),
        )

    def _call_seed(self, options: ChatOptions, index: int, prompt_ids: Sequence[int]) -> int:
        prompt = (hash(tuple(prompt_ids)),) if self._settings.seeds_by_prompt else ()
        with self._lock:
            self._calls_by_prompt[prompt] += 1
            number = self._calls_by_prompt[prompt]
        if options.seed is None or self._settings.client_sampling == "override":
            return hash((self._seed, *prompt, number)) & _MAX_SEED
        return options.seed & _MAX_SEED if index == 0 else hash((options.seed, index)) & _MAX_SEED

    def _check_degenerate(self, answer: ChatAnswer) -> None:
        """Set `anomaly` to the first fault of the episode's answers."""
        if not self._settings.madness_checklist or self.anomaly is not None:
            return
        call = answer.call
        text = self._codec.tokenizer.decode(list(call.completion_ids))
        checked = CheckedAnswer(text, answer.parsed, call.messages[:-1])
        found = find_anomaly(checked, self._settings.madness_checklist)
        if found is None:
            return
        check, description = found
        number = 1 + [each.call_id for each in self.calls].index(call.call_id)
        self.anomaly = Anomaly(check, description, call.call_id, number, call.agent_name)
        if self._settings.madness_ends_episode:
            raise AgentMadness(str(self.anomaly))


# How often a workflow may catch the call limit's error, for example once in each of its agents.
_MAX_CALL_LIMIT_ERRORS = 3
_MAX_SEED = 2**63 - 1
