"""Sections on the episodes: `rollout`, `debug`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from astuner.config.section import (
    ALL,
    FOR_SFT,
    INT_MAX,
    RAY,
    SAMPLED_ELSEWHERE,
    TINKER_SERVER,
    TRAINING,
    WITH_FRAMEWORK,
    Condition,
    Count,
    Number,
    PositiveInt,
    Seconds,
    Section,
    Seed,
    Variant,
    from_run,
    key,
    mirrors,
    set_aside,
    sets,
    unsupported,
)
from astuner.config.services import ApiAddress

AnomalyCheckName = Literal[
    "nonsense", "broken_characters", "repetition", "random_letters", "word_salad", "mixed_scripts", "wrong_toolcall",
    "language_switch",
]  # fmt: skip
Probability = Annotated[float, Field(gt=0, le=1)]


def _all_or_some(top_k: int) -> int:
    if top_k == 0:
        raise ValueError("expected -1 (all) or a number of at least 1")
    return top_k


def _greedy_or_finite(temperature: float) -> float:
    # The logits are divided by it: below, they overflow.
    if 0 < temperature < 0.001:
        raise ValueError("expected 0 (greedy) or a number of at least 0.001")
    return temperature


Temperature = Annotated[float, Field(ge=0, le=100), AfterValidator(_greedy_or_finite)]
TopK = Annotated[int, Field(ge=-1, le=INT_MAX), AfterValidator(_all_or_some)]


_SAMPLING = Variant("while {} is false (validation is greedy)", bool)
_ANOMALY_CHECKS = Variant("while {} is empty", bool)
_NO_BASE_URL = Condition("without a debug.base_url", lambda run: run.backbone == "debug" and not run.debug.base_url)
_NO_OWN_VLLM = Condition(
    "unless rollout.name is vllm and debug.base_url is null",
    lambda run: run.backbone == "debug" and (run.rollout.name != "vllm" or bool(run.debug.base_url)),
)


class MultiTurnConfig(Section):
    """`rollout.multi_turn`: limits of an episode."""

    max_sample_per_task: PositiveInt = key(30, trainers="limits the samples of an episode")
    """Maximum number of training samples from one episode."""
    max_steps: PositiveInt = key(30, trainers="limits the LLM calls of an episode")
    """Maximum number of LLM calls in one episode; on_max_steps applies to one more."""
    on_max_steps: Literal["judge", "fail"] = key("judge", trainers="ends an episode with too many LLM calls")
    """What a call beyond max_steps does: judge cuts the episode and judges its last answer, fail fails the episode."""
    expected_steps: PositiveInt = key(
        1,
        verl="used by `astuner check` only; a step trains all samples",
        trinity=sets("buffer.train_batch_size", rule="expected_samples"),
        resume="any",
    )
    """Expected samples per episode: for the batch size that `astuner check` prints and that Trinity is given."""


class ValKwargs(Section):
    """`rollout.val_kwargs`: sampling in validation."""

    chosen_by: ClassVar[str] = "do_sample"

    temperature: Temperature = key(
        0.0,
        variant=_SAMPLING,
        verl=mirrors("actor_rollout_ref.rollout.val_kwargs.temperature")
        + mirrors("actor_rollout_ref.rollout.val_kwargs.n", rule="validation_episodes"),
    )
    """Sampling temperature; 0 is greedy."""
    top_k: TopK = key(-1, variant=_SAMPLING, verl=mirrors("actor_rollout_ref.rollout.val_kwargs.top_k"))
    """Keep the k likeliest tokens; -1 keeps all."""
    top_p: Probability = key(1.0, variant=_SAMPLING, verl=mirrors("actor_rollout_ref.rollout.val_kwargs.top_p"))
    """Nucleus mass."""
    do_sample: bool = key(
        False,
        verl=mirrors("actor_rollout_ref.rollout.val_kwargs.do_sample")
        + mirrors("actor_rollout_ref.rollout.val_kwargs.n", rule="validation_episodes"),
    )
    """False decodes greedily, whatever the temperature."""
    num_repeat: Count = key(1, verl=mirrors("actor_rollout_ref.rollout.val_kwargs.n", rule="validation_episodes"))
    """Validation episodes per task; trainer_common.val_pass_n applies if it is larger. Greedy validation has one."""

    @property
    def samples(self) -> bool:
        """Whether validation samples; it is greedy without `do_sample`, and at temperature 0."""
        return self.do_sample and self.temperature > 0


class FrozenModelConfig(Section):
    """An entry of `rollout.frozen_models`: the model behind an agent that is not trained."""

    model: str = "policy"
    """The model at the endpoint; or policy, the model in training, or starting_model, its weights at the start."""
    base_url: str | None = None
    """An OpenAI-compatible endpoint, e.g. https://api.openai.com/v1."""
    api_key_env: str | None = None
    """The environment variable with the endpoint's API key; null if it needs none."""


class RolloutConfig(Section):
    """`rollout`: how the agent runs with the model."""

    chosen_by: ClassVar[str] = "compute_madness_checklist"

    use_agentscope_protocol: bool = key(True, trainers="selects the agent in astuner's episode workers")
    """Run agentscope_workflow or workflow.command. False plays the task's environment with the built-in agent loop."""
    action_form: Literal["auto", "text", "box", "code", "tool_call", "json"] = key(
        "auto", no_effect=(WITH_FRAMEWORK,), trainers="read from the answers of the agent loop"
    )
    """Form of the agent loop's actions; auto is env_action_preference, but tool_call for code if there are tools."""
    step_rewards: Literal["sum", "returns_to_go"] = key(
        "sum",
        no_effect=(WITH_FRAMEWORK,),
        wrong_for={"gigpo": "it compares the rewards of whole episodes, and the returns of steps in addition"},
        trainers="computed by the agent loop",
    )
    """The reward of an LLM call by the agent loop: the whole episode's, or the rewards from its step on."""
    agentscope_workflow: str | None = key(None, trainers="runs in astuner's episode workers", resume="path")
    """`package.module->Name`, the agent to tune: a Workflow class, or a function `async def run(task, model_tuner)`."""
    trainable_targets: list[str] | None = key(None, trainers="selects the calls that become samples")
    """Tags of the agents to train (model_tuner.for_agent(…, target_tag=…)); null trains all."""
    frozen_models: dict[str, FrozenModelConfig] = key({}, trainers="answers calls that are not trained")
    """Models behind the agents that are not trained, by tag, each with model, base_url and api_key_env."""
    players: dict[str, str] = key({}, no_effect=(WITH_FRAMEWORK,), trainers="play in the agent loop")
    """Programs that play seats in the environment: random, or `package.module->Class` of a ScriptedPlayer, by seat."""
    agentscope_disable_toolcalls: bool = key(False, trainers="shows the model no tools")
    """Show the model no tools, whatever the workflow registers."""
    sandbox: bool = key(True, trainers="applies to the tools of episodes")
    """Run AgentScope's execute_python_code in a sandbox: without network, your files and your environment variables."""
    max_env_worker: Count = key(
        128,
        used_by=TRAINING,
        verl="divided among the episode workers of all nodes",
        trinity=from_run("explorer.runner_per_model", rule="runners"),
        resume="any",
    )
    """Episodes that run at the same time."""
    isolation: Literal["process", "thread"] = key(
        "process",
        unsupported=set_aside("thread", by=("debug", "local"), why="episodes run in worker processes"),
        used_by=("debug", "local"),
        verl="verl's episodes always run in worker processes",
        trinity="the episodes of Trinity always run in worker processes",
        resume="any",
    )
    """Episodes run in worker processes, at most max_env_worker; thread is accepted for older files, without effect."""
    episode_timeout: Seconds = key(600.0, trainers="ends a slow episode")
    """Time limit of one episode without its judge, in seconds; a slower episode fails and is counted."""
    max_retries: Annotated[int, Field(ge=0, le=1000)] = key(0, trainers="runs a failed episode again")
    """How often a failed episode is run again; each attempt is recorded and counted."""
    gamma: Probability = key(1.0, trainers="applies to the rewards of the agent loop's steps")
    """Discount of the environment's rewards over an agent's steps; other agents than the agent loop need 1.0."""
    compute_madness_checklist: list[AnomalyCheckName] = key(["nonsense"], trainers="checked in every answer")
    """[Checks](anomaly_checks.md) of answers; nonsense is all but wrong_toolcall and language_switch."""
    agent_madness_termination: bool = key(True, variant=_ANOMALY_CHECKS, trainers="ends the episode")
    """End the episode at the first such sign."""
    agent_madness_reward: Number = key(-1.0, variant=_ANOMALY_CHECKS, trainers="becomes the reward")
    """The reward of an episode with degenerate output."""
    max_response_length_in_one_turn: PositiveInt = key(
        4096,
        verl="the `max_tokens` of every request",
        trinity=mirrors("model.max_response_tokens", rule="answer_tokens"),
    )
    """Maximum number of tokens in one answer."""
    max_model_len: PositiveInt = key(
        18000,
        despite=(FOR_SFT,),
        verl=sets("actor_rollout_ref.rollout.max_model_len", rule="max_model_len")
        + sets("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", rule="tokens_per_gpu"),
        trinity=from_run("model.max_model_len", rule="max_model_len")
        + from_run("model.max_response_tokens", rule="answer_tokens")
        + from_run("trainer.max_token_len_per_gpu", rule="tokens_per_gpu"),
    )
    """Maximum number of tokens in one call, prompt and answer together."""
    multi_turn: MultiTurnConfig = MultiTurnConfig()
    """Limits of an episode."""
    tensor_model_parallel_size: Count = key(
        1,
        used_by=RAY,
        no_effect=(TINKER_SERVER,),
        verl=sets("actor_rollout_ref.rollout.tensor_model_parallel_size"),
        trinity=sets("explorer.rollout_model.tensor_parallel_size"),
        resume="any",
    )
    """GPUs per inference engine."""
    n_vllm_engine: Count = key(
        2,
        used_by=("trinity",),
        no_effect=(TINKER_SERVER,),
        verl="verl starts one engine per tensor_model_parallel_size GPUs",
        trinity=sets("explorer.rollout_model.engine_num", rule="engines"),
        resume="any",
    )
    """Number of inference engines (trinity)."""
    max_num_seqs: Count = key(
        64,
        no_effect=(TINKER_SERVER, SAMPLED_ELSEWHERE),
        verl=sets("actor_rollout_ref.rollout.max_num_seqs"),
        trinity=sets("explorer.rollout_model.extra_engine_args.max_num_seqs"),
        resume="any",
    )
    """Requests that one engine computes at the same time."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = key(
        None,
        used_by=("debug", "trinity", "verl"),  # local runs its engine in process
        no_effect=(TINKER_SERVER, _NO_OWN_VLLM),
        verl=sets("actor_rollout_ref.rollout.gpu_memory_utilization", rule="gpu_share"),
        trinity=sets("explorer.rollout_model.gpu_memory_utilization", rule="gpu_share"),
        resume="any",
    )
    """Fraction of a GPU's memory for an engine; null is 0.5 if it shares the GPU with verl's trainer, else 0.85."""
    name: Literal["auto", "embedded", "vllm", "sglang"] = key(
        "auto",
        no_effect=(TINKER_SERVER,),
        verl=from_run("actor_rollout_ref.rollout.name", rule="rollout_name"),
        trinity=from_run("explorer.rollout_model.engine_type", rule="engine_type"),
        unsupported=set_aside("sglang", by=("debug",), why="debug samples in process or, with vllm, from a vLLM server")
        + set_aside("vllm", "sglang", by=("local",), why="local runs its engine in process")
        + set_aside("embedded", by=("trinity",), why="trinity samples from vLLM or from a Tinker server")
        + unsupported(
            "sglang",
            by=("trinity",),
            why="this backbone samples from vLLM (on CUDA) or from a Tinker server (on a CPU or elsewhere); write auto",
        )
        + unsupported(
            "sglang",
            by=("verl",),
            why="verl 0.9.1 requires SGLang 0.5.12, which requires transformers 5.6.0, which verl excludes, so no "
            "environment can have them; write auto, vllm, or embedded (on a CPU)",
        ),
    )
    """The inference engine; auto is embedded for local, debug and on a CPU, else vllm. Debug starts a server."""
    mode: Literal["sync", "async"] = key(
        "sync",
        used_by=("verl",),
        verl="only sync is supported",
        trinity="section asynchrony replaces it",
        unsupported=unsupported(
            "async",
            by=("verl",),
            why="all episodes of a step are sampled with the newest weights, before its update; verl's "
            "asynchronous trainers run other loops than astuner's, which this backbone runs; write sync or "
            "remove the line",
        ),
    )
    """Whether sampling waits for the update (sync) or continues during it (async: no backbone supports it)."""
    num_repeat: Count = key(
        4,
        verl=mirrors("actor_rollout_ref.rollout.n"),
        trinity=sets("algorithm.repeat_times") + sets("buffer.train_batch_size", rule="expected_samples"),
    )
    """Episodes per task in training (GRPO's group size)."""
    temperature: Temperature = key(
        0.9,
        verl=sets("actor_rollout_ref.rollout.temperature", rule="logits_divisor")
        + sets("actor_rollout_ref.rollout.logprobs_mode", rule="logprobs_mode"),
        trinity=sets("model.temperature", rule="logits_divisor"),
    )
    """Sampling temperature in training."""
    top_p: Probability = key(
        1.0,
        verl=sets("actor_rollout_ref.rollout.logprobs_mode", rule="logprobs_mode")
        + mirrors("actor_rollout_ref.rollout.top_p"),
        trinity=mirrors("model.top_p"),
    )
    """Nucleus mass in training."""
    top_k: TopK = key(
        -1,
        verl=sets("actor_rollout_ref.rollout.logprobs_mode", rule="logprobs_mode")
        + mirrors("actor_rollout_ref.rollout.top_k"),
        trinity=mirrors("model.top_k"),
    )
    """Keep the k likeliest tokens in training; -1 keeps all."""
    client_sampling: Literal["honour", "override"] = key(
        "honour", trainers="the episodes sample through the same model interface on all backbones"
    )
    """honour uses a request's temperature, top_p, top_k, penalties and seed; override uses the run's."""
    val_kwargs: ValKwargs = key(ValKwargs(), trinity="every request has its sampling parameters")
    """Sampling in validation."""

    @property
    def uses_starting_model(self) -> bool:
        """Whether the starting model answers for an agent."""
        return any(model.model == "starting_model" and model.base_url is None for model in self.frozen_models.values())

    @property
    def is_cut(self) -> bool:
        """Whether top-p or top-k restricts sampling in training; they have no effect on greedy sampling."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)


class DebugConfig(Section):
    """`debug`: settings of the debug backbone."""

    debug_max_parallel: Count = 16
    """Episodes that run at the same time; 1 runs them in the main thread, for breakpoints."""
    debug_first_n_tasks: PositiveInt = key(
        2, used_by=ALL, trainers="the number of tasks that `astuner check --dry-run` rolls out"
    )
    """Number of tasks that are rolled out."""
    base_url: ApiAddress | None = None
    """An OpenAI-compatible server to sample from (`http://127.0.0.1:8000/v1`), instead of the embedded engine."""
    api_key_env: str | None = key(None, no_effect=(_NO_BASE_URL,))
    """The environment variable with that server's API key; without it, none is sent."""
    base_url_timeout: Seconds = key(60.0, no_effect=(_NO_BASE_URL,))
    """Time limit for that server's first answers (its models, and one token) before the first episode, in seconds."""
    served_model: str | None = key(None, no_effect=(_NO_BASE_URL,))
    """The model's name on that server; default: model.path, or the only model that it serves."""
    debugger_port: Annotated[int, Field(ge=1024, le=65535)] = key(
        5678, used_by=TRAINING, trainers="the port at which `--db` waits for a debugger"
    )
    """Port of 127.0.0.1 to attach a debugger to when `--db` stops a training backbone."""
    debug_vllm_port: Annotated[int, Field(ge=1024, le=65535)] = key(18000, no_effect=(_NO_OWN_VLLM,))
    """Port of 127.0.0.1 for the vLLM server that astuner starts if rollout.name is vllm."""
    debug_vllm_seed: Seed = 12345
    """Seed of the sampling."""
    debug_tensor_parallel_size: Count = key(4, no_effect=(_NO_OWN_VLLM,))
    """Maximum number of GPUs for the vLLM server; without effect on a CPU."""
    debug_vllm_timeout: Seconds = key(600.0, no_effect=(_NO_OWN_VLLM,))
    """Time limit for the vLLM server to become ready, in seconds."""
