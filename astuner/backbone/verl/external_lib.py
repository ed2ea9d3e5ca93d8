"""verl's `external_lib`: verl imports this module in each of its processes (`actor_rollout_ref.model.external_lib`).

It registers astuner's rollout and training engines, and replaces two functions of verl that do not work here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import verl.workers.engine.fsdp.transformer_impl as fsdp
from torch import Tensor
from torch.distributed.tensor import DTensor
from verl.utils.device import get_device_id, get_device_name
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

from astuner.backbone.verl import training_engine
from astuner.backbone.verl.cpu import embedded_rollout

embedded_rollout.register()
training_engine.register()


def _merged_weights(engine: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield all weights, with LoRA adapters merged, in the dtype that the model computes in.

    verl's own implementation always rounds to bfloat16, and merges into the module's weights and back.
    """
    state = engine.module.state_dict()
    scale = engine.model_config.lora_alpha / engine.model_config.lora_rank

    def full_tensor(name: str) -> Tensor:
        shard: Any = state[name].detach().to(get_device_id())
        gathered: Tensor = shard.full_tensor() if isinstance(shard, DTensor) else shard
        return gathered.float()

    try:
        for name in state:
            if ".lora_" in name:
                continue
            weight = full_tensor(name)
            module, is_base, kind = name.rpartition(".base_layer.")
            if is_base and kind == "weight":
                lora_a, lora_b = (full_tensor(f"{module}.{part}.default.weight") for part in ("lora_A", "lora_B"))
                weight = weight + scale * (lora_b @ lora_a)
            yield name.removeprefix("base_model.model.").replace(".base_layer", ""), weight.to(engine._autocast_dtype)
    finally:
        # verl moves the shards to the GPU before it calls this function.
        if engine._is_offload_param:
            fsdp.offload_fsdp_model_to_cpu(engine.module)


fsdp.FSDPEngine._merged_lora_per_tensor_param = _merged_weights

if get_device_name() == "cpu":

    def _cpu_vllm_replica() -> type[RolloutReplica]:
        # Imported on demand, since it imports vLLM.
        from astuner.backbone.verl.cpu.vllm_replica import CpuVllmReplica

        return CpuVllmReplica

    RolloutReplicaRegistry.register("vllm", _cpu_vllm_replica)

    _torch_offload_policy: Any = fsdp.CPUOffloadPolicy

    def _unpinned_offload_policy(pin_memory: bool = False) -> Any:
        # Pinned memory needs a GPU.
        return _torch_offload_policy(pin_memory=False)

    fsdp.CPUOffloadPolicy = _unpinned_offload_policy
