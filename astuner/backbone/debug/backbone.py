"""The debug backbone: roll out a few tasks, judge the episodes and build their samples, without training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from loguru import logger

from astuner.backbone.base import MemoryEstimate, PreflightContext, RunContext, StartedRay
from astuner.backbone.episode_workers.rollout import make_rollout
from astuner.backbone.training.run_inputs import RunInputs
from astuner.backbone.training.run_state import RunState
from astuner.backbone.training.session import dry_run, write_summary
from astuner.config.keys import KeyPath
from astuner.config.root import AstunerConfig, RunConfig
from astuner.config.services import api_key
from astuner.doors import through_door
from astuner.llm_engine.causal_lm import choose_device, compute_dtype, load_causal_lm
from astuner.llm_engine.embedded.engine import EmbeddedEngine
from astuner.llm_engine.protocol import LlmEngine
from astuner.llm_engine.vllm_server.installation import asks_for_vllm_server, goes_without_vllm, starts_vllm
from astuner.schema import Episode, Split
from astuner.task_rollout.statistics import batch_metrics


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
        # What the page of the run shows.
        context.record.log_metrics(0 if split == "val" else 1, batch_metrics(episodes))
        write_summary(context, state, model=None)
        return episodes

    def check_config(
        self, config: RunConfig, origins: Mapping[KeyPath, str], ray: StartedRay | None, *, trains: bool
    ) -> None:
        """Log if the engine is not the configured one."""
        if asks_for_vllm_server(config.astuner) and goes_without_vllm(config.astuner):
            logger.warning("rollout.name: vllm is ignored: vLLM is not installed here, and debug samples in process")

    def preflight(self, preflight_context: PreflightContext) -> None:
        """Check nothing: the checks of the configuration cover this backbone."""

    def estimate(self, config: AstunerConfig, run_inputs: RunInputs) -> MemoryEstimate:
        """Estimate the memory of the process and its engine; a server's memory is not included."""
        estimate: MemoryEstimate = through_door("memory", "debug")(config, run_inputs)
        return estimate


@contextlib.contextmanager
def _engine(context: RunContext) -> Iterator[LlmEngine]:
    config, model_path = context.config.astuner, context.run_inputs.model_path
    if config.debug.base_url:
        yield through_door("engine", "completions").connect(
            config.debug.base_url,
            model=config.debug.served_model,
            default_model=config.model.path,
            max_model_len=config.rollout.max_model_len,
            api_key=api_key("debug.api_key_env", config.debug.api_key_env),
            timeout=config.debug.base_url_timeout,
        )
    elif starts_vllm(config):
        with through_door("engine", "vllm")(config, model_path, context.record.folder, context.keep_engine) as engine:
            yield engine
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
