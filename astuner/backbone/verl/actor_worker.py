"""verl's actor worker with a learning-rate setter, a Hugging Face model, and entropies without gradient."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from omegaconf import DictConfig
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils import torch_functional
from verl.workers.engine_workers import ActorRolloutRefWorker

from astuner.algorithms.kl import entropy_from_logprobs
from astuner.backbone.ray_cluster.worker_server import use_configured_threads
from astuner.llm_engine.weight_digests import weight_digests
from astuner.system.redaction.output import redact_output

_CHUNK_ROWS = 2048


class ActorWorker(ActorRolloutRefWorker):
    """Actor, reference model and rollout adapter on one accelerator."""

    def __init__(self, config: DictConfig, *args: Any, **kwargs: Any) -> None:
        redact_output()
        use_configured_threads()
        if not config.actor.entropy_coeff:
            disable_entropy_gradient()
        super().__init__(config, *args, **kwargs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate of the next update. astuner's schedule is a function of the step."""
        for group in self.actor.engine.optimizer.param_groups:
            group["lr"] = rate

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_model(self, folder: str, dtype: str) -> None:
        """Save the model, adapters merged, as a Hugging Face folder without tokenizer on the first worker's machine."""
        torch_dtype = getattr(torch, dtype)
        named_weights, _ = self.actor.engine.get_per_tensor_param(base_sync_done=False)
        weights = {}
        # The iterator gathers each weight from all workers, so that every worker must exhaust it.
        for name, tensor in named_weights:
            if self.rank == 0:
                weights[name] = tensor.detach().to("cpu", torch_dtype)
        if self.rank == 0:
            _save_pretrained(Path(folder), self.actor.model_config.local_path, weights, torch_dtype)
        torch.distributed.barrier()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weight_digests(self, dtype: str) -> dict[str, int]:
        """Return the first worker's checksums of all weights, adapters merged, rounded to the torch dtype `dtype`."""
        named_weights, _ = self.actor.engine.get_per_tensor_param(base_sync_done=False)
        # The iterator gathers each weight from all workers, so that every worker must exhaust it.
        digests = weight_digests(named_weights, getattr(torch, dtype))
        return digests if self.rank == 0 else {}


def _save_pretrained(folder: Path, model_path: str, weights: dict[str, Any], dtype: torch.dtype) -> None:
    config = AutoConfig.from_pretrained(model_path)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with contextlib.suppress(OSError):  # the model has no generation_config.json
        model.generation_config = GenerationConfig.from_pretrained(model_path)
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if config.tie_word_embeddings else set()
    model.save_pretrained(folder, state_dict={name: tensor for name, tensor in weights.items() if name not in tied})


def disable_entropy_gradient() -> None:
    """Make the training engines that this process creates from now on compute entropies without gradient.

    verl's functions keep tensors of the size of the logits for the backward pass, also where no loss contains the
    entropy.
    """
    torch_functional.entropy_from_logits = torch_functional.entropy_from_logits_with_chunking = entropy_from_logits


@torch.compiler.disable
@torch.no_grad()
def entropy_from_logits(logits: Tensor, chunk_size: int = _CHUNK_ROWS) -> Tensor:
    """Return each logit row's entropy, without gradient.

    Args:
        logits: [..., V].
        chunk_size: number of rows that are computed together. It bounds the temporary memory.

    Returns:
        [...] float32, in nats.
    """
    rows = torch.split(logits.flatten(end_dim=-2), chunk_size)
    entropies = torch.cat([entropy_from_logprobs(chunk.float().log_softmax(dim=-1)) for chunk in rows])
    return entropies.view(logits.shape[:-1])
