"""The memory of a debug run."""

from __future__ import annotations

from dataclasses import replace

from astuner.backbone.base import MemoryEstimate
from astuner.backbone.memory.estimate import BatchShape, engine_parts, model_shape, process_estimate, process_parts
from astuner.backbone.training.run_inputs import RunInputs
from astuner.config.root import AstunerConfig
from astuner.llm_engine.vllm_server.installation import starts_vllm


def estimate_memory(config: AstunerConfig, run_inputs: RunInputs) -> MemoryEstimate:
    """Estimate the memory of the process and its engine, in bytes; a server's memory is not included."""
    batch = BatchShape.of(config, run_inputs)
    episodes = min(config.debug.debug_first_n_tasks, len(run_inputs.tasks.training)) * config.rollout.num_repeat
    concurrent = min(config.debug.debug_max_parallel, config.rollout.max_num_seqs, episodes)
    batch = replace(batch, episodes=episodes, concurrent=concurrent)
    if config.debug.base_url or starts_vllm(config):
        server = "the server at debug.base_url" if config.debug.base_url else "the vLLM server"
        return process_estimate(config, batch, excluded=f"{server}, which holds the model")
    shape = model_shape(config, run_inputs.model_path)
    weights, cache = engine_parts(config, shape, batch)
    parts = (*process_parts(config, batch, shape.device), *weights, cache)
    return MemoryEstimate(shape.parameters, 0, {"rollout": parts}, shape.available)
