"""The memory on each GPU of a described machine in a verl run, for `astuner check --machine`."""

from __future__ import annotations

from collections.abc import Mapping

from astuner.backbone.base import MemoryEstimate
from astuner.backbone.memory.plan import (
    ShardedTrainer,
    cuda_contexts,
    engine_parts,
    fsdp_shards,
    gpu_model_shape,
    planned_run,
)
from astuner.backbone.verl.rules import VerlRunFacts, trainers_per_node
from astuner.backbone.verl.trainer_config import machine_problems, tree_problems
from astuner.config.keys import KeyPath
from astuner.config.root import RunConfig
from astuner.config.validation import raise_problems
from astuner.system.gpus import Machine


def verl_plan(
    config: RunConfig, origins: Mapping[KeyPath, str], model_path: str, machine: Machine
) -> list[MemoryEstimate]:
    """Return the estimate for each GPU in a verl run, where trainer and engine share the GPUs.

    Raises:
        ModelError: the model has no readable configuration, or lacks the target modules of LoRA.
        ConfigError: a run on such machines rejects the configuration.
    """
    config = planned_run(config, machine)
    run = config.astuner
    facts = VerlRunFacts(
        device="cuda",
        rollout_engine="vllm",
        model_path=model_path,
        flash_attention=True,  # it may be installed on the machine
        gpus=machine.gpus,
        origins=origins,
    )
    raise_problems([*machine_problems(config, facts), *tree_problems(config, facts, ())])
    shape = gpu_model_shape(run, model_path, machine, autocast=False)
    per_node = trainers_per_node(run, facts)
    gpus = per_node * run.trainer_common.nnodes
    shards, reference = (
        fsdp_shards(config.verl, ("verl", "actor_rollout_ref", role, "fsdp_config", "fsdp_size"), gpus)
        for role in ("actor", "ref")
    )
    trainer = ShardedTrainer(run, shape, shards, reference)
    context = cuda_contexts(processes=2)
    engine, problems = engine_parts(run, shape, machine, default_share=0.5)
    asleep = engine[:1]
    phases = {
        "rollout": (context, *trainer.resting, *engine),
        "log-probs": (context, *trainer.log_probs),
        "update": (context, *trainer.update),
        "sync": (context, *trainer.sync, *asleep),
        "checkpoint": (context, *trainer.checkpoint),
    }
    device = f"each of {gpus} GPUs (trainer and engine)"
    host = trainer.host * per_node
    return [
        MemoryEstimate(
            shape.parameters, shape.trained, phases, machine.memory, device=device, host=host, problems=problems
        )
    ]
