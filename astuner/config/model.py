"""The configuration section `model`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from astuner.config.section import (
    SAMPLED_ELSEWHERE,
    TINKER_SERVER,
    TRAINING,
    Condition,
    PositiveInt,
    Section,
    from_run,
    key,
    sets,
    when,
)

_EXCEPT_FOR_SFT = Condition(
    "except for sft: the sampler and the trainer have to agree", lambda run: not run.is_supervised
)


class LoraConfig(Section):
    """`model.lora`: train low-rank adapters instead of all weights."""

    rank: Annotated[int, Field(ge=0, le=65536)] = key(
        0, verl=sets("actor_rollout_ref.model.lora_rank"), trinity=sets("model.tinker.rank")
    )
    """Rank of the adapters; 0 trains all weights."""
    alpha: PositiveInt = key(
        32,
        verl=sets("actor_rollout_ref.model.lora_alpha"),
        trinity="sent to astuner's Tinker server; another Tinker service has 32",
    )
    """Scale: the adapters' output is multiplied by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = key(
        0.0, no_effect=(_EXCEPT_FOR_SFT,), trainers="none while a model learns from its own samples"
    )
    """Dropout on the adapters' input."""
    target_modules: str | list[str] = key(
        "all-linear",
        verl=sets("actor_rollout_ref.model.target_modules"),
        trinity="sent to astuner's Tinker server; another Tinker service supports only all-linear",
    )
    """Names of the modules that get adapters, or all-linear."""


class ModelConfig(Section):
    """`model`: the model to train."""

    path: str = key(
        "",
        verl=from_run("actor_rollout_ref.model.path", rule="model_path"),
        trinity=from_run("model.model_path", rule="model_path"),
        resume="path",
    )
    """A local folder, a Hugging Face name, or `package.module->function` that creates it and returns its path."""
    renderer: str | dict[str, Any] = key("auto", trainers="astuner turns messages into token ids", resume="same")
    """Turns messages into token ids: auto, a name (qwen3, llama-3, default, …), or a mapping with name and options."""
    dtype: Literal["auto", "float32", "bfloat16", "fastest"] = key(
        "auto",
        no_effect=(SAMPLED_ELSEWHERE,),
        verl=sets(
            "+actor_rollout_ref.actor.fsdp_config.mixed_precision",
            "+actor_rollout_ref.ref.fsdp_config.mixed_precision",
            rule="mixed_precision",
        )
        + sets("actor_rollout_ref.rollout.dtype", rule="rollout_dtype"),
        trinity=sets("explorer.rollout_model.dtype", rule="sampler_dtype"),
        resume="same",
    )
    """Data type; auto is bfloat16 on CUDA, else float32; fastest is also bfloat16 on CPUs with instructions for it."""
    gradient_checkpointing: bool = key(
        False,
        used_by=TRAINING,
        no_effect=(TINKER_SERVER,),
        verl=sets("actor_rollout_ref.model.enable_gradient_checkpointing"),
        trinity=sets("trainer.trainer_config.model.enable_gradient_checkpointing"),
        resume="any",
    )
    """Recompute activations in the backward pass, to save memory at the cost of time."""
    lora: LoraConfig = key(LoraConfig(), used_by=TRAINING, no_effect=(when("model.lora.rank", 0),), resume="same")
    """Low-rank adapters."""
