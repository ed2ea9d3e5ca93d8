"""The debug backbone: roll out a few tasks, judge them, make their samples, and stop there."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict

from astuner.backbone.base import MemoryEstimate, Prospect, RunContext
from astuner.backbone.batch import Batch, dry_run
from astuner.backbone.causal_lm import choose_device, compute_dtype, load_causal_lm
from astuner.backbone.ingredients import api_key
from astuner.backbone.memory import engine_memory, model_shape
from astuner.backbone.vllm_server.installed import installed_vllm
from astuner.backbone.vllm_server.server import vllm_server
from astuner.backbone.vllm_server.settings import settings_for
from astuner.config.root import AstunerConfig, starts_vllm
from astuner.llm_engine.completions import CompletionsEngine
from astuner.llm_engine.embedded import EmbeddedEngine
from astuner.llm_engine.protocol import LlmEngine
from astuner.run_record import EpisodesSummary, RunSummary, TokensSummary
from astuner.schema import Episode
from astuner.task_rollout import Split
from astuner.task_rollout.statistics import RunTotals

NAME = "debug"


class DebugBackbone:
    """Rolls out with the embedded engine, a vLLM server, or a server of the user's; has no trainer, and loads none."""

    def dry_run(self, context: RunContext, split: Split) -> list[Episode]:
        """Roll out a few tasks."""
        config = context.config.astuner
        with contextlib.ExitStack() as stack:
            with context.phase("load_model"):
                engine = stack.enter_context(_engine(context))
            stack.callback(engine.close)
            rollout = context.ingredients.rollout(config, engine, context.running)
            stack.callback(rollout.close)
            batch = dry_run(context, rollout, split, config.debug.debug_vllm_seed)
        context.record.write_summary(_summary(context, batch))
        return batch.episodes

    def refuse(self, prospect: Prospect) -> None:
        """Refuse nothing: the configuration's own checks know all of it."""

    def estimate(self, config: AstunerConfig, model_path: str) -> MemoryEstimate | None:
        """Estimate from shapes, the engine in process or in a server of astuner's; None where another server has it."""
        if config.debug.base_url:
            return None
        shape = model_shape(config, model_path)
        return MemoryEstimate(shape.parameters, 0, engine_memory(config, shape), shape.available)


def _summary(context: RunContext, batch: Batch) -> RunSummary:
    totals = RunTotals()
    totals.add(batch.episodes)
    return RunSummary(
        backbone=NAME,
        seed=context.config.astuner.debug.debug_vllm_seed,
        steps=0,
        seconds=round(time.time() - context.started, 3),
        first_reward_seconds=batch.first_reward_seconds,
        tokens=TokensSummary(**asdict(totals.tokens)),
        episodes=EpisodesSummary(ok=totals.ok, failed=totals.failed, dropped=totals.dropped),
    )


@contextlib.contextmanager
def _engine(context: RunContext) -> Iterator[LlmEngine]:
    config, model_path = context.config.astuner, context.ingredients.model_path
    if config.debug.base_url:
        yield CompletionsEngine.connect(
            config.debug.base_url,
            model=config.debug.served_model,
            wanted=config.model.path,
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
                wanted=settings.name,
                max_model_len=settings.max_model_len,
                api_key=None,
                launched=True,
                timeout=timeout,
            )
    else:
        device = choose_device(config.trainer_common.device)
        model = load_causal_lm(model_path, compute_dtype(config.model.dtype, device)).to(device)
        rollout = config.rollout
        yield EmbeddedEngine(model, max_model_len=rollout.max_model_len, max_num_seqs=rollout.max_num_seqs)
