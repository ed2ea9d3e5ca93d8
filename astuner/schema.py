"""The named types that cross module boundaries. All are frozen; none holds a tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from astuner.errors import WorkflowError

FinishReason = Literal["stop", "length"]
Split = Literal["train", "val"]
Message = Mapping[str, Any]
"""One chat message in OpenAI's form: `role`, `content`, and `tool_calls`, `tool_call_id` or `name` where they apply."""


@dataclass(frozen=True, slots=True)
class Task:
    """One problem to solve.

    Attributes:
        task_id: unique and stable within its data set; episodes of one `task_id` form a GRPO group.
        main_query: the question put to the agent.
        init_messages: chat messages that precede the query, where the data has them.
        metadata: every other field of the data row (e.g. `answer`), for the workflow and the judge.
        env_type: the environment that the task belongs to, for tasks of an environment service.
    """

    task_id: str
    main_query: str
    init_messages: tuple[Message, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    env_type: str = "no_env"


@dataclass(frozen=True, slots=True)
class WorkflowTask:
    """What a workflow is given: the task, and which episode of it this is.

    Attributes:
        task: the problem.
        episode_id: unique within a run.
        repeat_index: 0-based index of this episode within its group.
        seed: derived from run seed, step, task and repeat; use it for the workflow's own randomness.
        is_validation: whether the episode only measures the model.
    """

    task: Task
    episode_id: str
    repeat_index: int = 0
    seed: int = 0
    is_validation: bool = False

    @property
    def task_id(self) -> str:
        """The task's id."""
        return self.task.task_id


@dataclass(slots=True)
class WorkflowOutput:
    """What a workflow returns.

    Attributes:
        reward: the episode's reward, or `None` to have the judge score it. A mapping rewards each agent by its name
            (every agent that was trained must be in it), a list each LLM call, in the order of `ModelTuner.calls`;
            the episode's own reward is then their mean.
        is_success: whether the task was solved; `None` means "reward > 0" once a reward is known.
        metadata: anything the judge needs, e.g. `{"final_answer": "42"}`.
        log_metrics: numbers to average over the step and log.

    Raises:
        WorkflowError: a field has a value that training could not use.
    """

    reward: float | Mapping[str, float] | Sequence[float] | None = None
    is_success: bool | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    log_metrics: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.reward = _checked_rewards(self.reward)
        # numpy and torch scalars have `item`; a success of theirs is welcome.
        given: Any = self.is_success
        success = given.item() if hasattr(given, "item") else given
        if success is not None and not isinstance(success, bool):
            raise WorkflowError(f"WorkflowOutput.is_success must be True, False or None, got {self.is_success!r}")
        self.is_success = success
        for name in ("metadata", "log_metrics"):
            if not isinstance(getattr(self, name), dict):
                raise WorkflowError(f"WorkflowOutput.{name} must be a dict, got {getattr(self, name)!r}")


def _checked_rewards(reward: Any) -> float | dict[str, float] | tuple[float, ...] | None:
    if reward is None:
        return None
    rewards: dict[str, float] | tuple[float, ...]
    if isinstance(reward, Mapping):
        rewards = {
            str(agent): checked_reward(value, f"WorkflowOutput.reward[{agent!r}]") for agent, value in reward.items()
        }
    elif isinstance(reward, list | tuple):
        rewards = tuple(checked_reward(value, f"WorkflowOutput.reward[{at}]") for at, value in enumerate(reward))
    else:
        return checked_reward(reward, "WorkflowOutput.reward")
    if not rewards:
        raise WorkflowError(f"WorkflowOutput.reward must not be empty, got {reward!r}; give None to ask the judge")
    return rewards


def checked_reward(value: object, name: str) -> float:
    """Return `value` as a finite float.

    Raises:
        WorkflowError: `value` is no number, or is NaN or infinite.
    """
    # numpy and torch scalars have `item`; a reward of theirs is welcome.
    number = value.item() if hasattr(value, "item") else value
    if isinstance(number, bool):
        number = float(number)
    if not isinstance(number, int | float) or not math.isfinite(number):
        raise WorkflowError(f"{name} must be a finite number, got {value!r}")
    return float(number)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one completion is sampled.

    Attributes:
        temperature: 0 means greedy.
        top_p: nucleus mass in (0, 1].
        top_k: keep the k likeliest tokens; -1 keeps all.
        max_tokens: the most tokens to generate, stop token included.
        stop_token_ids: generation ends after any of these, which is part of the completion.
        seed: makes this request's draws repeatable whatever is batched beside it.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 512
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine generated for one prompt.

    Attributes:
        token_ids: the sampled ids, the stop token included when one was sampled.
        logprobs: one natural-log probability a token, of the temperature-scaled distribution before any
            top-p or top-k cut (of the unscaled one when greedy): what a trainer recomputes.
        finish_reason: `stop` (a stop token was sampled) or `length`.
        policy_version: the weights that it was sampled with.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    policy_version: int = 0


ForkCause = Literal[
    "template_rewrote_history",
    "framework_edited_history",
    "tools_changed",
    "system_changed",
    "retokenised_by_client",
    "truncated",
]
"""Why a request does not extend the call that it continues.

`template_rewrote_history`: same messages, but the chat template renders earlier turns differently once there are later
    ones (e.g. leaves out their thinking), or does not show that it keeps them.
`framework_edited_history`: a message before the last answer is another one than in the earlier call, was put in, or is
    an answer that the model never gave.
`tools_changed`: same messages, other tools.
`system_changed`: another system message, or one come or gone, before an earlier conversation.
`retokenised_by_client`: an answer says what the model said, white space aside, but in another form than the model was
    given back as: trimmed, thinking or tool calls written out in the text, text made into tool calls. Its rendering is
    another sequence of tokens than was sampled. (Ids and spacing of a tool call's JSON are no other form.)
`truncated`: messages of the earlier conversation were left out, those kept are as they were (e.g. the oldest turns, to
    fit the context); or the earlier answer was cut by `max_tokens` inside thinking or a list of tool calls, whose end
    was never sampled, so that the template cannot go on from its tokens. (An answer cut in its text can be gone on
    from: the end of turn that the template puts after it is context, never trained.)
"""


@dataclass(frozen=True, slots=True)
class Fork:
    """Why a call does not extend an earlier call that it should have extended.

    Attributes:
        cause: what happened.
        call_id: the earlier call.
        position: index of the first token at which the prompt differs from that call's prompt + completion.
        expected_ids, found_ids: the first few ids from there on, of that call and of this prompt.
        expected, found: their text.
        message_index: index of the first message of this request that is not as in that call, or where the messages
            are the same, of the message that `position` lies in.
    """

    cause: ForkCause
    call_id: str
    position: int
    expected_ids: tuple[int, ...]
    found_ids: tuple[int, ...]
    expected: str
    found: str
    message_index: int


@dataclass(frozen=True, slots=True)
class LlmCall:
    """One LLM request and its answer, token-exact.

    Attributes:
        call_id: unique within the run.
        episode_id: the episode that made it.
        prompt_ids: what the model was given.
        completion_ids: what it said, end token included only if it was sampled.
        logprobs: one a completion token (see `Completion.logprobs`).
        finish_reason: `stop` or `length`.
        sampling: the parameters it was sampled with.
        policy_version: the weights it was sampled with.
        agent_name: the agent that made it, where known.
        target_tag: names the trainable model it was sent to.
        trained: whether its completion is trained; if not, it is only context of calls that extend it.
        reward: what the workflow gave this call alone; None where it shares the episode's reward.
        tools_hash: identifies the tool list of the request, "" for none.
        messages: request and answer, with the thinking that the framework left out and the prompt holds; for display
            and to find the call that a request continues. Tokens are never made of an answer's text again.
        fork: why this call does not extend an earlier call that it should have extended, else None.
        start_time, end_time: seconds since the epoch.
    """

    call_id: str
    episode_id: str
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    sampling: SamplingParams = field(default_factory=SamplingParams)
    policy_version: int = 0
    agent_name: str = ""
    target_tag: str = "default"
    trained: bool = True
    reward: float | None = None
    tools_hash: str = ""
    messages: tuple[Message, ...] = ()
    fork: Fork | None = None
    start_time: float = 0.0
    end_time: float = 0.0


@dataclass(frozen=True, slots=True)
class CallSpan:
    """Where a call is trained in a sample.

    Attributes:
        call_id: the call.
        start, end: its prompt has `start` tokens, prompt and completion together `end`. In a row, the completion is
            `token_ids[start:end]` and the prompt `token_ids[:start]`.
        nodes: in a tree sample, where each of the completion's tokens stands; the prompt is what `parents` lead to
            from the first of them. None in a row.
    """

    call_id: str
    start: int
    end: int
    nodes: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """What is trained of an episode: one root-to-leaf path through its calls, or all of them as a tree.

    All per-token sequences have length N.

    Attributes:
        token_ids: N token ids.
        loss_mask: N numbers: how often the token at this place was sampled and is trained here (0 = context).
        logprobs: N natural-log probabilities as sampled; 0.0 where `loss_mask` is 0.
        position_ids: N positions.
        weight: this sample's share of its episode's trained tokens; the samples of an episode sum to 1.
        spans: where each call lies.
        episode_id: the episode it came from.
        parents: in a tree sample, N indices: of the token before each, which is an earlier one, or -1 where a sequence
            begins. A token sampled twice with different logprobs stands twice, and what follows it follows the first.
            None in a row, where each token follows the one before it.
    """

    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    position_ids: tuple[int, ...]
    weight: float
    spans: tuple[CallSpan, ...]
    episode_id: str = ""
    parents: tuple[int, ...] | None = None


EpisodeStatus = Literal["ok", "failed", "dropped"]


@dataclass(frozen=True, slots=True)
class Episode:
    """One run of a workflow on one task, finished.

    Attributes:
        episode_id: unique within the run.
        task: the problem.
        repeat_index: 0-based index within its group.
        status: `ok` (has a reward), `failed` (raised, hung, or was never scored), `dropped` (ok, but left no
            trainable token).
        reward: None unless a reward was given; a missing reward is never a zero. Where agents or calls were rewarded,
            the mean of their rewards.
        agent_rewards: the rewards by agent, where the workflow gave such.
        is_success: None where there is no reward.
        calls: every LLM call, in order of completion.
        samples: the training rows made of `calls`.
        dropped_samples: rows left out because of `max_sample_per_task`.
        error_kind, error: what went wrong, for `failed` and `dropped`.
        metadata: the workflow's metadata.
        log_metrics: numbers from the workflow.
        start_time, end_time: seconds since the epoch.
    """

    episode_id: str
    task: Task
    repeat_index: int
    status: EpisodeStatus
    reward: float | None
    is_success: bool | None
    calls: tuple[LlmCall, ...] = ()
    samples: tuple[Sample, ...] = ()
    dropped_samples: int = 0
    error_kind: str | None = None
    error: str | None = None
    agent_rewards: Mapping[str, float] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    log_metrics: Mapping[str, float] = field(default_factory=dict)
    start_time: float = 0.0
    end_time: float = 0.0


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens of a set of episodes.

    Attributes:
        raw: sum over calls of prompt and completion tokens.
        distinct: number of distinct token prefixes within each episode, summed.
        trained: how often a token is trained: each once per time that it was sampled.
    """

    raw: int = 0
    distinct: int = 0
    trained: int = 0

    @property
    def saving(self) -> float:
        """Raw tokens for each distinct one, which is what merging saves; 1.0 without tokens."""
        return self.raw / self.distinct if self.distinct else 1.0

    def __add__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(self.raw + other.raw, self.distinct + other.distinct, self.trained + other.trained)


@dataclass(frozen=True, slots=True)
class TaskSet:
    """Training and validation tasks of a run; `skipped_rows` counts bad rows left out on request."""

    training: Sequence[Task]
    validation: Sequence[Task]
    skipped_rows: int = 0
