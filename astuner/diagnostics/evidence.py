"""Inputs for the checks: a run's inputs, a step's episodes, the tasks' reference answers, and the step's update."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from astuner.config.root import AstunerConfig
from astuner.errors import WorkflowError
from astuner.model_tuner.codec import ChatCodec
from astuner.run_record.updates import SampleUpdate
from astuner.schema import Episode, Ints, LlmCall, Task, TaskSet
from astuner.task_rollout.tool_use import ToolUse, text_of

T = TypeVar("T")
Result = Iterator[tuple[str, str]]
"""The findings of a check. Each is a pair: the fault with its evidence, and how to fix it."""

_PROBE_SYSTEM, _PROBE_USER, _PROBE_RESULT = "system probe 7391", "user probe 2846", "result probe 5170"
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
# Texts in the form of control tokens, such as `<|im_start|>`. A tokenizer should have each as one token.
_CONTROL_TEXT = re.compile(r"<\|[A-Za-z_]{2,30}\|>|<(?:start|end)_of_turn>")
REFERENCE_FIELDS = (
    "answer", "reference_answer", "ground_truth", "gold", "target", "solution", "expected_answer", "expected", "label",
)  # fmt: skip
_ANSWER_NAMES = ("answer", "final", "prediction", "predicted", "response", "result", "output")
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True)
class TemplateFacts:
    """Properties of the chat template, found by rendering probe messages.

    Attributes:
        shows_system, shows_user, shows_tools, shows_results: whether the prompt contains a system message, a user
            message, an offered tool's name, and a tool call's result; None if the template rejects them.
        split_controls: control texts of the rendered prompts that the tokenizer splits into several tokens.
        unknown_share: share of the rendered prompts' tokens that are the tokenizer's unknown token.
        bos_count: number of BOS tokens at a prompt's start.
        reads_tool_calls: whether the renderer knows the format in which the model calls tools.
    """

    shows_system: bool | None
    shows_user: bool | None
    shows_tools: bool | None
    shows_results: bool | None
    split_controls: tuple[str, ...] = ()
    unknown_share: float = 0.0
    bos_count: int = 0
    reads_tool_calls: bool = True


@dataclass(frozen=True)
class ModelFacts:
    """Properties of the model and its tokenizer, read from their files.

    Attributes:
        vocabulary: number of rows in the model's embedding; None if unknown.
        tokenizer_size: the largest token id of the tokenizer + 1.
        end_ids: end-of-sequence ids in the model's `generation_config.json` and `config.json`.
        stop_ids: ids that end an answer in this run.
    """

    vocabulary: int | None
    tokenizer_size: int
    end_ids: tuple[int, ...]
    stop_ids: tuple[int, ...]
    special_ids: frozenset[int]
    bos_id: int | None


@dataclass(frozen=True)
class StartEvidence:
    """A run's inputs; `decode` returns the text of token ids."""

    config: AstunerConfig
    tasks: TaskSet
    template: TemplateFacts
    model: ModelFacts
    decode: Callable[[Sequence[int]], str]
    trains: bool = True


def tokens_digest(ids: Ints) -> bytes:
    """Return a digest of token ids, for dictionaries: prompts themselves take long to hash."""
    return hashlib.blake2b(np.asarray(ids, np.int32).data, digest_size=16).digest()


def groups_of(values: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    """Return the groups of values with equal keys, without single-value groups."""
    groups: dict[Hashable, list[T]] = defaultdict(list)
    for value in values:
        groups[key(value)].append(value)
    return [group for group in groups.values() if len(group) > 1]


@dataclass(frozen=True)
class StepEvidence:
    """The episodes from a training step or a dry run.

    Attributes:
        step: the training step, 1-based.
        episodes: all episodes, including failed ones.
        previous_tasks: the ids of the previous step's tasks; None for the first step of a process.
        calls_before: number of sampled answers in this process's earlier steps.
        stops_before: number of these answers that end with an end token.
        tools_before: number of this process's earlier episodes with tools, and number of their tool calls.
    """

    start: StartEvidence
    step: int
    episodes: Sequence[Episode]
    previous_tasks: frozenset[str] | None = None
    calls_before: int = 0
    stops_before: int = 0
    tools_before: tuple[int, int] = (0, 0)

    @functools.cached_property
    def scored(self) -> tuple[Episode, ...]:
        """The episodes that have a reward."""
        return tuple(episode for episode in self.episodes if episode.reward is not None)

    @functools.cached_property
    def sampled_calls(self) -> tuple[LlmCall, ...]:
        """The calls whose answers were sampled from the model in training."""
        return tuple(call for e in self.episodes for call in e.calls if call.trained and call.completion_ids)

    @functools.cached_property
    def stops(self) -> int:
        """The number of sampled answers that end with an end token."""
        return sum(call.finish_reason == "stop" for call in self.sampled_calls)

    @functools.cached_property
    def tools(self) -> tuple[int, int]:
        """The number of episodes with tools so far, and the number of their tool calls."""
        uses = [use for use in map(ToolUse.of, self.episodes) if use.is_offered]
        offered, called = self.tools_before
        return offered + len(uses), called + sum(use.calls for use in uses)


@dataclass(frozen=True)
class UpdateEvidence:
    """The result of a step's update.

    Attributes:
        metrics: the metrics of the update, by name; empty if there was none.
        advantages: by episode id.
        samples: by episode id, how each of its samples was trained.
        gaps: `logprob_difference` in earlier steps of this process.
        dtype: the dtype that the model computes in; None if unknown.
    """

    rollout: StepEvidence
    metrics: Mapping[str, float]
    advantages: Mapping[str, float]
    samples: Mapping[str, Sequence[SampleUpdate]]
    gaps: Sequence[float] = ()
    dtype: str | None = None


@dataclass(frozen=True)
class Transcript:
    """An episode's longest conversation, and in it the results of tools as (tool name, arguments, text)."""

    messages: Sequence[Mapping[str, Any]]
    results: Sequence[tuple[str, str, str]] = field(default=())

    @staticmethod
    def of(episode: Episode) -> Transcript:
        """Return the transcript of an episode, from the call with the most messages."""
        messages = max((call.messages for call in episode.calls), key=len, default=())
        called: dict[str, tuple[str, str]] = {}
        results = []
        for message in messages:
            for call in message.get("tool_calls") or ():
                function = call.get("function") or {}
                called[str(call.get("id"))] = (str(function.get("name")), str(function.get("arguments")))
            if message.get("role") == "tool":
                name, arguments = called.get(str(message.get("tool_call_id")), (str(message.get("name") or ""), ""))
                results.append((name, arguments, text_of(message)))
        return Transcript(messages, tuple(results))


def probe_template(codec: ChatCodec) -> TemplateFacts:
    """Render probe messages with the chat template of a run."""
    system, user = {"role": "system", "content": _PROBE_SYSTEM}, {"role": "user", "content": _PROBE_USER}
    function = {"name": "probe_tool", "arguments": '{"a": 1}'}
    called = {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    result = {"role": "tool", "content": _PROBE_RESULT, "tool_call_id": "1", "name": "probe_tool"}
    plain = _rendered(codec, [user], None)
    with_system = _rendered(codec, [system, user], None)
    with_tools = _rendered(codec, [user], [_PROBE_TOOL])
    with_result = _rendered(codec, [user, called, result], [_PROBE_TOOL])
    prompts = [ids for ids in (plain, with_system, with_tools) if ids is not None]
    tokenizer = codec.tokenizer
    texts = [codec.decode(ids) for ids in prompts]
    controls = {mark for text in texts for mark in _CONTROL_TEXT.findall(text)}
    unknown = tokenizer.unk_token_id
    total = sum(map(len, prompts))
    first = prompts[0] if prompts else ()
    starts = next((index for index, token in enumerate(first) if token != tokenizer.bos_token_id), len(first))
    return TemplateFacts(
        shows_system=_contains(codec, with_system, _PROBE_SYSTEM),
        shows_user=_contains(codec, plain, _PROBE_USER),
        shows_tools=_contains(codec, with_tools, "probe_tool"),
        shows_results=_contains(codec, with_result, _PROBE_RESULT),
        split_controls=tuple(
            sorted(mark for mark in controls if len(tokenizer.encode(mark, add_special_tokens=False)) != 1)
        ),
        unknown_share=sum(ids.count(unknown) for ids in prompts) / total if total and unknown is not None else 0.0,
        bos_count=starts if tokenizer.bos_token_id is not None else 0,
        reads_tool_calls=codec.reads_tool_calls,
    )


def _rendered(
    codec: ChatCodec, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> tuple[int, ...] | None:
    """Return the prompt ids; None if the template rejects the messages."""
    try:
        return codec.render(messages, tools)
    except WorkflowError:
        return None


def _contains(codec: ChatCodec, ids: tuple[int, ...] | None, text: str) -> bool | None:
    return None if ids is None else text in codec.decode(ids)


def model_facts(codec: ChatCodec, model_path: str) -> ModelFacts:
    """Read the configuration files of a model. Values that cannot be read are unknown."""
    from transformers import AutoConfig, GenerationConfig

    tokenizer = codec.tokenizer
    vocabulary, ends = None, set[int]()
    with contextlib.suppress(OSError, ValueError, KeyError):
        text = AutoConfig.from_pretrained(model_path).get_text_config()
        vocabulary = getattr(text, "vocab_size", None)
        ends |= set(_ids(getattr(text, "eos_token_id", None)))
    with contextlib.suppress(OSError, ValueError, KeyError):
        ends |= set(_ids(GenerationConfig.from_pretrained(model_path).eos_token_id))
    return ModelFacts(
        vocabulary=vocabulary,
        tokenizer_size=max(tokenizer.get_vocab().values(), default=-1) + 1,
        end_ids=tuple(sorted(ends)),
        stop_ids=codec.stop_token_ids,
        special_ids=frozenset(tokenizer.all_special_ids),
        bos_id=tokenizer.bos_token_id,
    )


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (int(value),)


def reference(task: Task) -> str | None:
    """Return a task's reference answer; None if it has none with at most 40 characters."""
    for name in REFERENCE_FIELDS:
        value = task.metadata.get(name)
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            continue
        text = str(value).rpartition("####")[2]
        text = normalised((_BOXED.findall(text) or [text])[-1])
        if 0 < len(text) <= 40:
            return text
    return None


def normalised(text: str) -> str:
    """Return a text in lower case without thousands separators, currency signs, final dots and outer white space."""
    text = text.strip().strip("$").rstrip(".").replace(",", "").lower()
    return text.removesuffix(".0")


def is_number(text: str) -> bool:
    """Return whether a normalised text is a number."""
    return _NUMBER.fullmatch(text) is not None


def answer_is_right(episode: Episode, expected: str) -> bool | None:
    r"""Return whether the answer of an episode equals the reference; None if the text does not decide it.

    The answer is right if a field of the workflow's metadata, the last `\boxed{…}`, or the whole last message equals
    the reference. The answer is wrong if none of them contains the reference.
    """
    texts = list(_answers(episode))
    if not texts:
        return None
    for text in texts:
        boxed = _BOXED.findall(text)
        if normalised((boxed or [text])[-1]) == expected:
            return True
    plain = " ".join(texts).replace(",", "").lower()
    found = re.search(rf"(?<![\w.]){re.escape(expected)}(?!\w|\.\d)", plain)
    return None if found else False


def _answers(episode: Episode) -> Iterator[str]:
    named: list[Any] = [
        value for name, value in episode.metadata.items() if any(word in str(name).lower() for word in _ANSWER_NAMES)
    ]
    for value in named:
        if isinstance(value, str | int | float) and not isinstance(value, bool) and str(value).strip():
            yield str(value)
    messages = Transcript.of(episode).messages
    if messages and messages[-1].get("role") == "assistant" and text_of(messages[-1]).strip():
        yield text_of(messages[-1])
