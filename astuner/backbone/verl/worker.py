"""verl's training worker, with the two things that astuner asks of it beside."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.engine_workers import ActorRolloutRefWorker

from astuner.run_record import redact_output


class TrainingActor(ActorRolloutRefWorker):
    """Actor, reference and rollout adapter of one accelerator."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        redact_output()
        super().__init__(*args, **kwargs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_learning_rate(self, rate: float) -> None:
        """Use `rate` in the next update: astuner's schedule depends on the step alone."""
        for group in self.actor.engine.optimizer.param_groups:
            group["lr"] = rate

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_model(self, folder: str, dtype: str) -> None:
        """Write a Hugging Face folder without tokenizer, adapters merged in.

        Args:
            folder: where to, on a file system that the first worker's machine has.
            dtype: the weights' type there.
        """
        kind = getattr(torch, dtype)
        named, _ = self.actor.engine.get_per_tensor_param(base_sync_done=False)
        weights = {}
        for name, tensor in named:  # gathered from all workers as it is drawn, so that all of them must draw all
            if self.rank == 0:
                weights[name] = tensor.detach().to("cpu", kind)
        if self.rank == 0:
            _write(Path(folder), self.actor.model_config.local_path, weights, kind)
        torch.distributed.barrier()


def _write(folder: Path, model_path: str, weights: dict[str, Any], dtype: torch.dtype) -> None:
    shape = AutoConfig.from_pretrained(model_path)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(shape, dtype=dtype)
    with contextlib.suppress(OSError):  # not every model has one
        model.generation_config = GenerationConfig.from_pretrained(model_path)
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if shape.tie_word_embeddings else set()
    model.save_pretrained(folder, state_dict={name: tensor for name, tensor in weights.items() if name not in tied})
