"""The debug backbone: roll out a few tasks, judge the episodes and build their samples, without training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace

from loguru import logger

from astuner.backbone.base import MemoryEstimate, PreflightContext, RunContext
from astuner.backbone.training.memory_estimate import (
    BatchShape,
    engine_parts,
    model_shape,
    process_estimate,
    process_parts,
)
from astuner.backbone.training.run_inputs import RunInputs
from astuner.backbone.training.run_state import RunState
from astuner.backbone.training.session import dry_run, write_summary
from astuner.backbone.training.worker_process_pool import make_rollout
from astuner.config.keys import KeyPath
from astuner.config.root import AstunerConfig, RunConfig, asks_for_vllm_server, goes_without_vllm, starts_vllm
from astuner.config.services import api_key
from astuner.llm_engine.causal_lm import choose_device, compute_dtype, load_causal_lm
from astuner.llm_engine.completions import CompletionsEngine
from astuner.llm_engine.embedded import EmbeddedEngine
from astuner.llm_engine.protocol import LlmEngine
from astuner.llm_engine.vllm_server.installation import installed_vllm
from astuner.llm_engine.vllm_server.server import vllm_server
from astuner.llm_engine.vllm_server.settings import settings_for
from astuner.ray_cluster.head import StartedRay
from astuner.schema import Episode
from astuner.task_rollout import Split


class DebugBackbone:
    """Rolls out with the embedded engine, a vLLM server that it starts, or the user's own server. It has no trainer."""

    def dry_run(self, context: RunContext, split: Split) -> list[Episode]:
        """Roll out a few tasks, and write the summary."""
        config, state = context.config.astuner, RunState()
        with contextlib.ExitStack() as stack:
            with context.phase("load_model"):
                engine = stack.enter_context(_engine(context))
            stack.callback(engine.close)
            rollout = make_rollout(config, context.run_inputs, engine, context.active_episodes)
            stack.callback(rollout.close)
            episodes = dry_run(context, rollout.run, split, state, config.debug.debug_vllm_seed)
        state.totals.add(episodes)
        write_summary(context, state, model=None)
        return episodes

    def check_config(
        self, config: RunConfig, origins: Mapping[KeyPath, str], ray: StartedRay | None, *, trains: bool
    ) -> None:
        """Log if the engine is not the configured one."""
        if asks_for_vllm_server(config.astuner) and goes_without_vllm(config.astuner):
            logger.warning("rollout.name: vllm is set aside: vLLM is not installed here, and debug samples in process")

    def preflight(self, preflight_context: PreflightContext) -> None:
        """Check nothing: the checks of the configuration cover this backbone."""

    def estimate(self, config: AstunerConfig, run_inputs: RunInputs) -> MemoryEstimate:
        """Estimate the memory of the process and its engine; a server's memory is not included."""
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


@contextlib.contextmanager
def _engine(context: RunContext) -> Iterator[LlmEngine]:
    config, model_path = context.config.astuner, context.run_inputs.model_path
    if config.debug.base_url:
        yield CompletionsEngine.connect(
            config.debug.base_url,
            model=config.debug.served_model,
            default_model=config.model.path,
            max_model_len=config.rollout.max_model_len,
            api_key=api_key("debug.api_key_env", config.debug.api_key_env),
            timeout=config.debug.base_url_timeout,
        )
    elif starts_vllm(config):
        settings = settings_for(config, model_path, installed_vllm())
        timeout, record = config.debug.debug_vllm_timeout, context.record.folder
        with vllm_server(settings, record, timeout, keep=context.keep_engine):
            yield CompletionsEngine.connect(
                f"{settings.address}/v1",
                model=settings.name,
                default_model=settings.name,
                max_model_len=settings.max_model_len,
                api_key=None,
                launched=True,
                timeout=timeout,
            )
    else:
        device = choose_device(config.trainer_common.device)
        model = load_causal_lm(model_path, compute_dtype(config.model.dtype, device)).to(device)
        rollout = config.rollout
        yield EmbeddedEngine(
            model,
            max_model_len=rollout.max_model_len,
            max_num_seqs=rollout.max_num_seqs,
            tokenizer=context.run_inputs.tokenizer,
        )
