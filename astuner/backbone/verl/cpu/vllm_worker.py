"""vLLM worker extension that updates weights on a CPU.

vLLM's worker processes import this module; it is separate from `vllm_replica` to keep their imports small.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension


class CpuWorkerExtension(vLLMColocateWorkerExtension):
    """verl's worker extension with a weight update that works on a CPU.

    verl loads weights in place. On a CPU, vLLM packs each layer's weights for oneDNN and discards the originals.
    """

    def update_weights_from_ipc(
        self, peft_config: Mapping[str, object] | None = None, base_sync_done: bool = False, use_shm: bool = False
    ) -> None:
        """Load the weights that verl's training worker sends, for all further requests.

        Args:
            peft_config: ignored; adapters are already merged.
            use_shm: whether weights are sent through shared memory, which is the case on a CPU.
        """
        weights: list[tuple[str, Tensor]] = []

        def on_bucket(bucket: list[tuple[str, Tensor]], is_last: bool) -> None:
            # The next bucket overwrites this one's memory.
            weights.extend((name, tensor.clone()) for name, tensor in bucket)

        BucketedWeightReceiver(self._get_zmq_handle(), torch.device("cpu"), use_shm).receive_weights(on_bucket)
        self.reload_weights(weights_iterator=iter(weights))
        head: Any = getattr(self.model_runner.get_model(), "lm_head", None)
        if hasattr(head, "cpu_linear"):
            # A head that is tied to the embedding is not among the weights, so reload_weights did not repack it.
            head.quant_method.process_weights_after_loading(head)
