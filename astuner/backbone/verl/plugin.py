"""What verl loads in each of its processes (`actor_rollout_ref.model.external_lib`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import verl.workers.engine.fsdp.transformer_impl as fsdp
from torch import Tensor
from torch.distributed.tensor import DTensor
from verl.utils.device import get_device_id, get_device_name
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

from astuner.backbone.verl import embedded_rollout

embedded_rollout.register()


def _merged_weights(engine: Any) -> Iterator[tuple[str, Tensor]]:
    """Give all weights with the adapters merged in, in the type that the model computes in.

    verl's own rounds them to bfloat16 whatever that type is, and merges into the module's own weights and out again.
    """
    state = engine.module.state_dict()
    scale = engine.model_config.lora_alpha / engine.model_config.lora_rank

    def whole(name: str) -> Tensor:
        part: Any = state[name].detach().to(get_device_id())
        gathered: Tensor = part.full_tensor() if isinstance(part, DTensor) else part
        return gathered.float()

    for name in state:
        if ".lora_" in name:
            continue
        weight = whole(name)
        owner, is_base, kind = name.rpartition(".base_layer.")
        if is_base and kind == "weight":
            down, up = (whole(f"{owner}.{part}.default.weight") for part in ("lora_A", "lora_B"))
            weight = weight + scale * (up @ down)
        yield name.removeprefix("base_model.model.").replace(".base_layer", ""), weight.to(engine._autocast_dtype)


fsdp.FSDPEngine._merged_lora_per_tensor_param = _merged_weights


def _vllm_on_cpu() -> type[RolloutReplica]:
    # It imports vLLM.
    from astuner.backbone.verl.vllm_on_cpu import CpuVllmReplica

    return CpuVllmReplica


if get_device_name() == "cpu":
    RolloutReplicaRegistry.register("vllm", _vllm_on_cpu)

    _policy_of_torch: Any = fsdp.CPUOffloadPolicy

    def _unpinned(pin_memory: bool = False) -> Any:
        """Offload as verl asks, but not to pinned memory, which needs a GPU."""
        return _policy_of_torch(pin_memory=False)

    fsdp.CPUOffloadPolicy = _unpinned
