"""What vLLM's workers do beside sampling on a CPU: take the weights that are trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension


class CpuWorkerExtension(vLLMColocateWorkerExtension):
    """verl's extension, whose loading in place does not work on a CPU.

    There vLLM packs each layer's weights for oneDNN and throws away what they were packed from.
    """

    def update_weights_from_ipc(
        self, peft_config: Mapping[str, object] | None = None, base_sync_done: bool = False, use_shm: bool = False
    ) -> None:
        """Sample all further requests with the weights that verl's worker sends.

        Args:
            peft_config: not looked at; adapters are merged already.
            base_sync_done: not looked at.
            use_shm: whether they come through shared memory, as on a CPU they do.
        """
        weights: list[tuple[str, Tensor]] = []

        def take(part: list[tuple[str, Tensor]], is_last: bool) -> None:
            # They lie in memory that the next part is written to.
            weights.extend((name, tensor.clone()) for name, tensor in part)

        BucketedWeightReceiver(self._get_zmq_handle(), torch.device("cpu"), use_shm).receive_weights(take)
        self.reload_weights(weights_iterator=iter(weights))
        head: Any = getattr(self.model_runner.get_model(), "lm_head", None)
        if hasattr(head, "cpu_linear"):
            # One that is tied to the embedding is in no list of weights, so that nobody has packed it anew.
            head.quant_method.process_weights_after_loading(head)
