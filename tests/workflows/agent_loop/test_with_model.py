"""The agent loop with a real model: the samples are exact, and their logprobs are those of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from astuner.config.workflow import ContextTrackerConfig
from astuner.context_tracker.audit import certificate
from astuner.llm_engine.embedded.engine import EmbeddedEngine
from astuner.model_tuner.chat_options import CallSettings
from astuner.model_tuner.codec import ChatCodec
from astuner.schema import Task, WorkflowTask
from astuner.task_runner.runner import TaskRunner
from astuner.workflows.agent_loop.workflow import EnvWorkflow, LoopSettings
from tests.workflows.agent_loop.conftest import QWEN3, Corridor, LocalInstance


@pytest.mark.parametrize("kind", ["linear", "sliding_window", "linear_think", "auto_context"])
async def test_a_model_is_sampled_and_recorded_exactly(tokenizer: Any, model_folder: Path, kind: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder)
    engine = EmbeddedEngine(model, max_model_len=512)
    history = ContextTrackerConfig.model_validate(
        {
            "context_tracker_type": kind,
            "max_env_len": 100,
            "auto_context_cm": {"prompt": "Summarize."},
            "alien_llm_response_length": 8,
            "sliding_window_cm": {"turns": 1},
        }
    )
    runner = TaskRunner(
        workflow=lambda: EnvWorkflow(LoopSettings("text", history)),
        judge=None,
        engine=engine,
        codec=ChatCodec(tokenizer, QWEN3),
    )
    task = WorkflowTask(Task("corridor", "unused"), "episode", seed=1, env=LocalInstance(Corridor()))
    limits = dict.fromkeys(("max_model_len", "max_prompt_length", "max_response_length"), 512)
    try:
        episode = await runner.run(task, runner.tuner(task, CallSettings(max_tokens=6, max_calls=6, **limits)))
    finally:
        engine.close()
    assert (episode.status, len(episode.calls)) == ("ok", 6), episode.error
    assert certificate(episode.calls, episode.samples) == 1.0
    forked = [call.fork.cause for call in episode.calls if call.fork]
    own = {"sliding_window": "window_moved", "auto_context": "history_compressed"}
    assert set(forked) - {"truncated"} == {own[kind]} & set(forked) if kind in own else not forked
    assert bool(forked) == (kind in own)
    for call in episode.calls:
        with torch.no_grad():
            logits = model(torch.tensor([call.prompt_ids + call.completion_ids])).logits[0].double()
        expected = logits.log_softmax(-1)[len(call.prompt_ids) - 1 : -1]
        chosen = expected.gather(1, torch.tensor(call.completion_ids)[:, None])[:, 0]
        assert chosen.tolist() == pytest.approx(call.logprobs, abs=1e-3)
