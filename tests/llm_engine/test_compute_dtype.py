"""The dtype of the computation on GPUs, and on CPUs with and without instructions for bfloat16."""

from __future__ import annotations

import pytest
import torch
from loguru import logger

from astuner.llm_engine import causal_lm
from astuner.llm_engine.causal_lm import compute_dtype
from astuner.llm_engine.cpu_linear import multiplies_bfloat16

CPU, GPU = torch.device("cpu"), torch.device("cuda")
LOW, FULL = torch.bfloat16, torch.float32


@pytest.mark.parametrize("name", ["auto", "float32", "bfloat16", "fastest"])
@pytest.mark.parametrize("has_instructions", [True, False])
def test_the_dtype_of_the_device(name: str, has_instructions: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(causal_lm, "multiplies_bfloat16", lambda: has_instructions)
    on_gpu = {"auto": LOW, "float32": FULL, "bfloat16": LOW, "fastest": LOW}
    on_cpu = {"auto": FULL, "float32": FULL, "bfloat16": LOW, "fastest": LOW if has_instructions else FULL}
    assert (compute_dtype(name, GPU), compute_dtype(name, CPU)) == (on_gpu[name], on_cpu[name])


@pytest.mark.parametrize("has_instructions", [True, False])
def test_a_slow_dtype_is_reported_once(has_instructions: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(causal_lm, "multiplies_bfloat16", lambda: has_instructions)
    causal_lm._warn_of_slow_bfloat16.cache_clear()
    messages: list[str] = []
    sink = logger.add(messages.append, level="WARNING", format="{message}")
    for name in ("auto", "float32", "fastest", "bfloat16", "bfloat16"):
        compute_dtype(name, CPU)
    logger.remove(sink)
    assert [("no instructions for it" in message) for message in messages] == ([] if has_instructions else [True])


def test_the_instructions_of_this_processor():
    assert not multiplies_bfloat16() or torch.ops.mkldnn._is_mkldnn_bf16_supported()
