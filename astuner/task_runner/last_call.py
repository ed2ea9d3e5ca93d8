"""What an episode's model was asked last."""

from __future__ import annotations

import time

from astuner.model_tuner import ModelTuner


def last_call(tuner: ModelTuner) -> str:
    """Say which LLM call of an episode ended last and which are open: model, prompt tokens, seconds."""
    now, calls = time.time(), tuner.calls
    said = ["no LLM call finished"]
    if calls:
        last = calls[-1]
        said = [
            f"last finished LLM call {last.call_id} ({_model(last.target_tag, last.agent_name)}, "
            f"{len(last.prompt_ids)} prompt tokens, {now - last.end_time:.1f} s ago)"
        ]
    for call in tuner.open_calls:
        tokens = "" if call.prompt_tokens is None else f"{call.prompt_tokens} prompt tokens, "
        model = _model(call.target_tag, call.agent_name)
        said.append(f"an LLM call open ({model}, {tokens}begun {now - call.start_time:.1f} s ago)")
    return ", ".join(said)


def _model(target_tag: str, agent_name: str) -> str:
    return f"model {target_tag}" + (f" for {agent_name}" if agent_name else "")
