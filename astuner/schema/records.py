"""Tasks, episodes, LLM calls and training samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from astuner.errors import WorkflowError, short_repr
from astuner.schema.environment import EnvInstance, EnvTask
from astuner.schema.packed import Floats, Ints, pack_floats
from astuner.schema.rewards import AgentStep, Judgement, checked_rewards
from astuner.schema.sampling import FinishReason, Fork, Message, SamplingParams

JSON_KEY = "json_key"
"""The key of a field's metadata with the field's JSON key in the run record, if that is not the field's name."""

Split = Literal["train", "val"]


@dataclass(frozen=True, slots=True)
class Task:
    """One problem to solve.

    Attributes:
        task_id: unique and stable within its data set; episodes of one `task_id` form a GRPO group.
        main_query: the question for the agent.
        init_messages: chat messages that precede the question, if the data has them.
        metadata: all other fields of the data row, for example `answer`, for the workflow and the judge.
        env_type: the task's environment, for tasks of an environment service.
        env: how an episode gets an instance of the environment; None for tasks of other readers.
        source: the reader of a mixture that the task comes from; "" without a mixture.
    """

    task_id: str
    main_query: str
    init_messages: tuple[Message, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    env_type: str = "no_env"
    env: EnvTask | None = None
    source: str = ""


@dataclass(frozen=True, slots=True)
class WorkflowTask:
    """A workflow's input: a task and the episode's identity.

    Attributes:
        task: the task.
        episode_id: unique within a run.
        repeat_index: 0-based index of this episode within its group.
        seed: derived from run seed, step, task and repeat; for the workflow's own randomness.
        is_validation: True for validation episodes, which are not trained on.
        env: the instance of the task's environment, if it has one; released when the episode ends.
    """

    task: Task
    episode_id: str
    repeat_index: int = 0
    seed: int = 0
    is_validation: bool = False
    env: EnvInstance | None = None

    @property
    def task_id(self) -> str:
        """The id of the task."""
        return self.task.task_id

    @property
    def main_query(self) -> str:
        """The question of the task."""
        return self.task.main_query

    @property
    def init_messages(self) -> tuple[Message, ...]:
        """The chat messages that precede the question of the task."""
        return self.task.init_messages

    @property
    def metadata(self) -> Mapping[str, Any]:
        """All other fields of the task's data row."""
        return self.task.metadata


@dataclass(slots=True)
class WorkflowOutput:
    """The output of a workflow.

    Attributes:
        reward: the reward of the episode; None if the judge computes it. A mapping has the agents' rewards by name
            (every trained agent must be in it), and a list the LLM calls' rewards in the order of `ModelTuner.calls`;
            the episode's reward is then their mean.
        is_success: whether the task was solved; None means `reward > 0`.
        metadata: data for the judge, for example `{"final_answer": "42"}`.
        log_metrics: numbers that are averaged over the step and logged.
        steps: the LLM calls' steps in the order of `ModelTuner.calls`, for algorithms that compare steps; None
            for a call without one.
        calls: the episode's LLM calls, in order of completion. astuner sets them for the judge.

    Raises:
        WorkflowError: a field has an invalid value.
    """

    reward: float | Mapping[str, float] | Sequence[float] | None = None
    is_success: bool | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    log_metrics: dict[str, float] = field(default_factory=dict)
    steps: Sequence[AgentStep | None] = field(default=(), kw_only=True)
    calls: tuple[LlmCall, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        self.reward = checked_rewards(self.reward)
        if not isinstance(self.steps, list | tuple) or any(
            not isinstance(step, AgentStep | None) for step in self.steps
        ):
            raise WorkflowError(f"WorkflowOutput.steps must be a list of AgentStep, got {short_repr(self.steps)}")
        # numpy and torch scalars are accepted; they have `item`.
        value: Any = self.is_success
        success = value.item() if hasattr(value, "item") else value
        if success is not None and not isinstance(success, bool):
            raise WorkflowError(
                f"WorkflowOutput.is_success must be True, False or None, got {short_repr(self.is_success)}"
            )
        self.is_success = success
        for name in ("metadata", "log_metrics"):
            if not isinstance(getattr(self, name), dict):
                raise WorkflowError(f"WorkflowOutput.{name} must be a dict, got {short_repr(getattr(self, name))}")


@dataclass(frozen=True, slots=True)
class LlmCall:
    """An LLM request and its answer, with their exact tokens.

    The ids and logprobs of recorded calls are `Packed`: they equal tuples, and calls share what their prompts share.

    Attributes:
        call_id: unique within the run.
        episode_id: the id of the episode.
        prompt_ids: the ids of the prompt.
        completion_ids: the sampled ids, including the end token only if it was sampled.
        logprobs: the log-probability of each completion token (see `Completion.logprobs`).
        finish_reason: `stop` or `length`.
        sampling: the sampling parameters.
        policy_version: the version of the weights that sampled the completion.
        agent_name: the agent that made the call; "" if unknown.
        target_tag: the target that the call was sent to (see `rollout.trainable_targets`).
        trained: whether the completion is trained; if not, it is only context of the calls that extend it.
        reward: the reward of this call or its agent; None if the episode's reward applies.
        step: the agent's step, with a hash in place of its state; None if unknown.
        tools_hash: identifies the tools of the request; "" for no tools.
        messages: the request and the answer, including thinking that the prompt contains but the framework left out.
            They are used for display and to find the call that a request continues; answers are never re-tokenised.
        fork: why the call does not extend an earlier call that it should have extended; None if it does.
        cut: whether the agent did not receive the whole answer, for example because its client closed the connection.
        start_time, end_time: seconds since the epoch.
        sampler_logprobs: see `Completion.sampler_logprobs`.
    """

    call_id: str
    episode_id: str
    prompt_ids: Ints
    completion_ids: Ints
    logprobs: Floats
    finish_reason: FinishReason
    sampling: SamplingParams = field(default_factory=SamplingParams)
    policy_version: int = 0
    agent_name: str = ""
    target_tag: str = "default"
    trained: bool = True
    reward: float | None = None
    step: AgentStep | None = None
    tools_hash: str = ""
    messages: tuple[Message, ...] = ()
    fork: Fork | None = None
    cut: bool = False
    start_time: float = 0.0
    end_time: float = 0.0
    sampler_logprobs: Floats = ()


@dataclass(frozen=True, slots=True)
class CallSpan:
    """The position of a trained call in a sample.

    Attributes:
        call_id: the call's id.
        start, end: the lengths of the prompt, and prompt and completion together. In a row, the prompt is
            `token_ids[:start]` and the completion `token_ids[start:end]`.
        nodes: in a tree sample, the index of each completion token; the prompt consists of the first one's
            ancestors (see `Sample.parents`). None in a row.
    """

    call_id: str
    start: int
    end: int
    nodes: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """An episode's training sample: a row, which is one root-to-leaf path through its calls, or a tree of all calls.

    All per-token sequences have length N.

    Attributes:
        token_ids: N token ids.
        train_counts: N counts: how often the token at this index was sampled and is trained; 0 for context.
        logprobs: N natural-log probabilities from the sampler; 0.0 where `train_counts` is 0.
        position_ids: N positions.
        weight: the sample's fraction of its episode's trained tokens; an episode's sample weights sum to 1.
        spans: the positions of the calls.
        episode_id: the id of the episode.
        parents: in a tree sample, N indices of each token's parent, which precedes it; -1 for first tokens. A token
            that was sampled with several logprobs occurs once for each, and its children belong to the first
            occurrence. None in a row, where the parent of each token is the token before it.
    """

    token_ids: Ints
    train_counts: Ints = field(metadata={JSON_KEY: "loss_mask"})
    logprobs: Floats
    position_ids: Ints
    weight: float
    spans: tuple[CallSpan, ...]
    episode_id: str = ""
    parents: Ints | None = None

    @property
    def trained_logprobs(self) -> Floats:
        """The sampler's logprobs of the trained tokens, in order."""
        import numpy as np

        return pack_floats(np.asarray(self.logprobs, float)[np.asarray(self.train_counts) != 0].tolist())


@dataclass(frozen=True, slots=True)
class Anomaly:
    """Degenerate output, such as endless repetition (`rollout.compute_madness_checklist`).

    Attributes:
        check: the name of the check that found it.
        description: the fault of the answer, with an excerpt.
        call_id: the id of the call whose answer it is.
        call: the number of this call in the episode, from 1.
        agent_name: the agent that made the call; "" if unknown.
    """

    check: str
    description: str
    call_id: str
    call: int
    agent_name: str = ""

    def __str__(self) -> str:
        agent = f" of agent {self.agent_name}" if self.agent_name else ""
        return f"call {self.call}{agent}: {self.check}: {self.description}"


EpisodeStatus = Literal["ok", "failed", "dropped"]


@dataclass(frozen=True, slots=True)
class Episode:
    """A finished run of a workflow on a task.

    Attributes:
        episode_id: unique within the run.
        task: the task.
        repeat_index: 0-based index within its group.
        status: `ok` (has a reward), `failed` (raised, timed out, is unscored, or has samples that are not exact),
            `dropped` (has a reward but no trainable tokens).
        reward: None if there is no reward; a missing reward never counts as 0. If agents or calls have rewards, this is
            their mean.
        agent_rewards: the rewards by agent, if the workflow returned them.
        is_success: None if there is no reward.
        calls: all LLM calls, in order of completion.
        samples: the training samples of `calls`.
        dropped_samples: the number of samples left out because of `max_sample_per_task`.
        error_kind, error: the error of a `failed` or `dropped` episode; `max_steps` for an `ok` one that was cut.
        error_traceback: the tracebacks of the exceptions that made it fail.
        process_effects: the settings of the process that it, or an episode at the same time, changed; they were put
            back.
        metadata: the metadata of the workflow.
        log_metrics: the metrics of the workflow.
        judgement: the result of the judge; None if no judge scored the episode, or if it raised an error.
        ended_processes: the processes that the episode had left running and astuner has ended: command line and id.
        anomaly: the first degenerate output of the model; None if there was none.
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
    error_traceback: str | None = None
    process_effects: tuple[str, ...] = ()
    agent_rewards: Mapping[str, float] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    log_metrics: Mapping[str, float] = field(default_factory=dict)
    judgement: Judgement | None = None
    ended_processes: tuple[str, ...] = ()
    anomaly: Anomaly | None = None
    start_time: float = 0.0
    end_time: float = 0.0


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Token counts for a set of episodes.

    Attributes:
        raw: the number of prompt and completion tokens, summed over calls.
        distinct: each episode's number of distinct token prefixes, summed over episodes.
        trained: the number of trained tokens, each counted as often as it was sampled.
    """

    raw: int = 0
    distinct: int = 0
    trained: int = 0

    @property
    def saving(self) -> float:
        """The ratio of raw to distinct tokens, which is the saving by merging; 1.0 without tokens."""
        return self.raw / self.distinct if self.distinct else 1.0

    def __add__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(self.raw + other.raw, self.distinct + other.distinct, self.trained + other.trained)


@dataclass(frozen=True, slots=True)
class TaskSet:
    """The tasks of a run.

    Attributes:
        training, validation: the tasks, with unique ids within each split.
        skipped_rows: the number of invalid rows (see `skip_bad_rows`).
        weights: for a mixture, the weights of its readers by `Task.source`.
        left_out: the number of tasks that filters left out, by cause.
    """

    training: Sequence[Task]
    validation: Sequence[Task]
    skipped_rows: int = 0
    weights: Mapping[str, float] = field(default_factory=dict)
    left_out: Mapping[str, int] = field(default_factory=dict)
