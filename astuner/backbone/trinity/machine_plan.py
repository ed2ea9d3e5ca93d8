"""The memory on each GPU of a described machine in a trinity run, for `astuner check --machine`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from astuner.backbone.base import MemoryEstimate, MemoryPart
from astuner.backbone.memory.estimate import SMALLER_MODEL, BatchShape, ModelShape
from astuner.backbone.memory.estimate import engine_parts as embedded_engine_parts
from astuner.backbone.memory.plan import (
    ENGINE_SHARE,
    SYNC_BUFFER,
    ShardedTrainer,
    cuda_contexts,
    engine_parts,
    fsdp_shards,
    gpu_model_shape,
    max_length,
    planned_run,
)
from astuner.backbone.training.tinker_policy import batch_tokens
from astuner.backbone.trinity.preflight import machine_problems
from astuner.backbone.trinity.rules import TrinityRunFacts, engine_count, gpus_per_node, runners_per_engine
from astuner.backbone.trinity.trainer_config import configured_tinker_service
from astuner.config.keys import KeyPath
from astuner.config.root import AstunerConfig, RunConfig
from astuner.config.validation import raise_problems
from astuner.errors import ConfigError
from astuner.system.gpus import Machine
from astuner.system.localhost import ADDRESS

_FSDP_SIZE = ("fsdp_config", "fsdp_size")
_SEQUENCE = "lower rollout.max_model_len, or use --backbone=verl, which divides micro-batches over GPUs"


def trinity_plan(
    config: RunConfig, origins: Mapping[KeyPath, str], model_path: str, machine: Machine
) -> list[MemoryEstimate]:
    """Return the estimates for one trainer GPU and one engine GPU, or for the GPU that trains adapters.

    Raises:
        ModelError: the model has no readable configuration, or lacks the target modules of LoRA.
        ConfigError: a run on such machines rejects the configuration.
    """
    if configured_tinker_service(config) is not None:
        text = "trinity.model.tinker.base_url is set, so the model is at that service, and the run uses no GPU"
        raise ConfigError(f"{text}; remove the key to plan for --machine")
    config = planned_run(config, machine)
    run = config.astuner
    uses_tinker = run.model.lora.rank > 0
    facts = TrinityRunFacts(
        mode="both",
        device="cuda",
        model_path=model_path,
        checkpoint_root_dir=Path(),
        total_steps=1,
        namespace="astuner",
        max_model_len=run.rollout.max_model_len,
        tinker_base_url=f"http://{ADDRESS}" if uses_tinker else None,
        runners=runners_per_engine(run, engine_count(run, uses_tinker=uses_tinker)),
        flash_attention=True,  # it may be installed on the machine
        gpus=machine.gpus,
        origins=origins,
    )
    raise_problems([*machine_problems(config, facts)])
    shape = gpu_model_shape(run, model_path, machine, autocast=False)
    if uses_tinker:
        return [_tinker_estimate(run, shape, machine)]
    return _sharded_estimates(config, shape, machine, gpus_per_node(run, facts))


def _sharded_estimates(config: RunConfig, shape: ModelShape, machine: Machine, per_node: int) -> list[MemoryEstimate]:
    run = config.astuner
    engines = run.rollout.n_vllm_engine * run.rollout.tensor_model_parallel_size
    gpus = per_node * run.trainer_common.nnodes - engines
    shards, reference = (
        fsdp_shards(config.trinity, ("trinity", "trainer", "trainer_config", role, *_FSDP_SIZE), gpus)
        for role in ("actor", "ref")
    )
    trainer = ShardedTrainer(run, shape, shards, reference)
    context = cuda_contexts(processes=1)
    training = {
        "rollout": (context, *trainer.resting),
        "log-probs": (context, *trainer.log_probs),
        "update": (context, *trainer.update),
        "sync": (context, *trainer.sync),
        "checkpoint": (context, *trainer.checkpoint),
    }
    engine, problems = engine_parts(run, shape, machine, default_share=0.85)
    buffers = MemoryPart("buffers", SYNC_BUFFER, ENGINE_SHARE)
    sampling = {"rollout": (context, *engine), "sync": (context, *engine, buffers)}
    return [
        MemoryEstimate(
            shape.parameters,
            shape.trained,
            training,
            machine.memory,
            device=f"each of {gpus} GPUs of the trainer",
            host=trainer.host * min(per_node, gpus),
        ),
        MemoryEstimate(
            shape.parameters,
            0,
            sampling,
            machine.memory,
            device=f"each of {engines} GPUs of the engines",
            problems=problems,
        ),
    ]


def _tinker_estimate(config: AstunerConfig, shape: ModelShape, machine: Machine) -> MemoryEstimate:
    """Return the estimate for the Tinker server's GPU, which samples while it trains adapters."""
    engine, cache = embedded_engine_parts(config, shape, BatchShape.longest_of(config, max_length(config, shape)))
    vocabulary = shape.text.vocab_size
    tokens = max(batch_tokens(vocabulary), max_length(config, shape))
    # The logits and a copy without padding, and two tensors in float32.
    logits = tokens * vocabulary * (2 * shape.width + 8)
    held = (
        cuda_contexts(processes=1),
        MemoryPart("weights", shape.parameters * shape.width + shape.trained * 4, SMALLER_MODEL),
        MemoryPart("optimizer (AdamW)", shape.trained * 8, "lower model.lora.rank"),
        *engine,
        cache,
    )
    phases = {
        "rollout": held,
        "update": (
            *held,
            MemoryPart("gradients", shape.trained * 4, "lower model.lora.rank"),
            MemoryPart("activations of a batch", int(tokens * shape.activation_bytes), _SEQUENCE),
            MemoryPart("logits of a batch", logits, _SEQUENCE),
        ),
        "sync": (
            *held,
            MemoryPart("weights with adapters merged", shape.layer_parameters * shape.width, SMALLER_MODEL),
        ),
    }
    device = "one GPU (a Tinker server, which trains adapters and samples)"
    return MemoryEstimate(shape.parameters, shape.trained, phases, machine.memory, device=device)
