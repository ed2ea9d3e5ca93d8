"""Sections that say how episodes run: `model`, `rollout`, `context_tracker`, `debug`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from astuner.config.section import Section

Probability = Annotated[float, Field(gt=0, le=1)]


def _all_or_some(top_k: int) -> int:
    if top_k == 0:
        raise ValueError("expected -1 (all) or a number of at least 1")
    return top_k


TopK = Annotated[int, Field(ge=-1), AfterValidator(_all_or_some)]


def _address(url: str | None) -> str | None:
    if url is not None and not url.startswith(("http://", "https://")):
        raise ValueError("expected an address such as http://127.0.0.1:8000/v1")
    return url


class LoraConfig(Section):
    """`model.lora`: train low-rank adapters instead of all weights."""

    rank: Annotated[int, Field(ge=0)] = 0
    """Rank of the adapters; 0 trains all weights."""
    alpha: PositiveInt = 32
    """Scale: the adapters' output is multiplied by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the adapters' input."""
    target_modules: str | list[str] = "all-linear"
    """Module names that get adapters, or all-linear."""


class ModelConfig(Section):
    """`model`: the model to train."""

    path: str = ""
    """A local folder, a Hugging Face name, or `package.module->function` that makes the folder and returns its path."""
    renderer: str | dict[str, Any] = "auto"
    """Turns messages into token ids: auto, a name (qwen3, llama-3, default, …), or a mapping with name and options."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Weights' type; auto is bfloat16 on CUDA and float32 on CPU."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    lora: LoraConfig = LoraConfig()
    """Low-rank adapters."""


class MultiTurnConfig(Section):
    """`rollout.multi_turn`: bounds on an episode."""

    max_sample_per_task: PositiveInt = 30
    """The most training samples that one episode may give."""
    max_steps: PositiveInt = 30
    """The most LLM calls of one episode; one more ends the episode as failed."""
    expected_steps: PositiveInt = 1
    """Expected samples per episode, for batch arithmetic."""


class ValKwargs(Section):
    """`rollout.val_kwargs`: sampling in validation."""

    temperature: NonNegativeFloat = 0.0
    """Sampling temperature; 0 is greedy."""
    top_k: TopK = -1
    """Keep the k likeliest tokens; -1 keeps all."""
    top_p: Probability = 1.0
    """Nucleus mass."""
    do_sample: bool = False
    """False forces greedy decoding whatever the temperature."""
    num_repeat: PositiveInt = 1
    """Validation episodes per task; trainer_common.val_pass_n raises it where that is larger."""


class FrozenModelConfig(Section):
    """An entry of `rollout.frozen_models`, by target: what answers for agents that are not trained."""

    model: str = "policy"
    """The endpoint's name of the model; policy is the model in training, whose answers are then not trained."""
    base_url: str | None = None
    """An OpenAI-compatible endpoint, e.g. https://api.openai.com/v1."""
    api_key_env: str | None = None
    """The environment variable that holds the endpoint's key; null where it needs none."""


class RolloutConfig(Section):
    """`rollout`: how the agent runs against the model."""

    use_agentscope_protocol: bool = True
    """Run the class of agentscope_workflow. (False, the older step protocol, is no longer offered.)"""
    agentscope_workflow: str | None = None
    """`package.module->Class`, the Workflow to tune."""
    trainable_targets: list[str] | None = None
    """Tags of the agents to train (model_tuner.for_agent(…, target_tag=…)); null trains all."""
    frozen_models: dict[str, FrozenModelConfig] = Field(default_factory=dict)
    """What answers for agents that are not trained, by tag: model, base_url and api_key_env each."""
    agentscope_disable_toolcalls: bool = False
    """Show the model no tools, whatever the workflow registers."""
    max_env_worker: PositiveInt = 128
    """Episodes that run at the same time."""
    episode_timeout: Annotated[float, Field(gt=0)] = 600.0
    """Seconds that one episode may take, judge apart; a slower one fails and is counted."""
    max_retries: Annotated[int, Field(ge=0)] = 0
    """How often an episode that failed is run again; each attempt is recorded and counted."""
    gamma: Probability = 1.0
    """Discount of the reward over the steps of an episode; only 1.0, no discount, is offered."""
    compute_madness_checklist: list[Literal["nonsense", "wrong_toolcall"]] = Field(default=["nonsense"])
    """Signs that the model lost control: nonsense (endless repetition, broken characters), wrong_toolcall."""
    agent_madness_termination: bool = True
    """End the episode at the first such sign."""
    agent_madness_reward: float = -1.0
    """The reward of an episode that showed such a sign."""
    max_response_length_in_one_turn: PositiveInt = 4096
    """The most tokens of one answer."""
    max_model_len: PositiveInt = 18000
    """The most tokens, prompt and answer together, of one call."""
    multi_turn: MultiTurnConfig = MultiTurnConfig()
    """Bounds on an episode."""
    tensor_model_parallel_size: PositiveInt = 1
    """GPUs per inference engine."""
    n_vllm_engine: PositiveInt = 2
    """Number of inference engines (trinity)."""
    max_num_seqs: PositiveInt = 64
    """Requests that one engine computes at the same time."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    """The share of a GPU's memory that an inference engine takes; null is 0.5 beside verl's trainer, else 0.85."""
    name: Literal["auto", "embedded", "vllm", "sglang"] = "auto"
    """The inference engine; auto is embedded for local, debug and on a CPU, vllm otherwise. Debug starts vllm."""
    mode: Literal["sync", "async"] = "sync"
    """Whether sampling waits for the update (sync) or goes on while it is made (async: no backbone has it)."""
    num_repeat: PositiveInt = 4
    """Episodes per task in training (GRPO's group size)."""
    temperature: NonNegativeFloat = 0.9
    """Sampling temperature in training."""
    top_p: Probability = 1.0
    """Nucleus mass in training."""
    top_k: TopK = -1
    """Keep the k likeliest tokens in training; -1 keeps all."""
    val_kwargs: ValKwargs = ValKwargs()
    """Sampling in validation."""


class ContextTrackerConfig(Section):
    """`context_tracker`: used only by the older step protocol (rollout.use_agentscope_protocol: False)."""

    context_tracker_type: Literal["linear"] = "linear"
    """How history is managed."""
    alien_llm_model: str = "qwen3-235b-a22b-instruct-2507"
    """The helper model that summarises."""
    alien_llm_response_length: PositiveInt = 512
    """The most tokens of its answer."""
    max_env_len: PositiveInt = 4096
    """The most tokens of one observation."""


class DebugConfig(Section):
    """`debug`: the debug backbone's own settings."""

    debug_max_parallel: PositiveInt = 16
    """Episodes that run at the same time; 1 runs them in the main thread, for breakpoints."""
    debug_first_n_tasks: PositiveInt = 2
    """How many tasks are rolled out."""
    base_url: Annotated[str | None, AfterValidator(_address)] = None
    """An OpenAI-compatible server to sample from (`http://127.0.0.1:8000/v1`) in place of the embedded engine."""
    api_key_env: str | None = None
    """The environment variable that holds that server's key; none is sent without it."""
    base_url_timeout: Annotated[float, Field(gt=0)] = 60.0
    """Seconds within which that server has to answer before the first episode: with its models, and with a token."""
    served_model: str | None = None
    """The model's name on that server; by default model.path, or the only model that it serves."""
    debugger_port: Annotated[int, Field(ge=1024, le=65535)] = 5678
    """Port of 127.0.0.1 at which a debugger attaches where `--db` stops a training backbone."""
    debug_vllm_port: Annotated[int, Field(ge=1024, le=65535)] = 18000
    """Port, on this machine only, of the vLLM server that astuner starts where rollout.name is vllm."""
    debug_vllm_seed: NonNegativeInt = 12345
    """Seed of the sampling."""
    debug_tensor_parallel_size: PositiveInt = 4
    """GPUs of the vLLM server, as far as there are so many; on a CPU it means nothing."""
    debug_vllm_timeout: Annotated[float, Field(gt=0)] = 600.0
    """Seconds within which the vLLM server has to be ready."""
