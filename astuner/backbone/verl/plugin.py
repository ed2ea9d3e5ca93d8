"""What verl loads in each of its processes (`actor_rollout_ref.model.external_lib`)."""

from __future__ import annotations

from typing import Any

import verl.workers.engine.fsdp.transformer_impl as fsdp
from verl.utils.device import get_device_name

from astuner.backbone.verl import embedded_rollout

embedded_rollout.register()

if get_device_name() == "cpu":
    _policy_of_torch: Any = fsdp.CPUOffloadPolicy

    def _unpinned(pin_memory: bool = False) -> Any:
        """Offload as verl asks, but not to pinned memory, which needs a GPU."""
        return _policy_of_torch(pin_memory=False)

    fsdp.CPUOffloadPolicy = _unpinned
