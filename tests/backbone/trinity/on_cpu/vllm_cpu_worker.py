"""vLLM's worker for a CPU, under Trinity; for tests alone."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker


class CpuWorker(CPUWorker):
    """Takes weights from Trinity's synchronizer or from disk, as the stock worker's first rank does."""

    def apply_patches(self) -> None:
        """Do nothing: what Trinity patches is for prompts' logprobs, which astuner does not ask for."""

    def take_weights(self, method: str, place: str, namespace: str) -> None:
        """Sample further requests with the trainer's newest weights."""
        import ray
        from trinity.common.models.utils import load_state_dict_iterator
        from trinity.manager.synchronizer import Synchronizer

        weights: list[tuple[str, Any]]
        if method == "checkpoint":
            weights = list(load_state_dict_iterator(place))
        else:
            synchronizer = Synchronizer.get_actor(namespace=namespace)
            weights = list(ray.get(synchronizer.get_model_state_dict.remote())[0].items())
        self.reload_weights(weights_iterator=iter(weights))
        head: Any = getattr(self.model_runner.get_model(), "lm_head", None)
        if hasattr(head, "cpu_linear"):
            # One that is tied to the embedding is in no list of weights, so that nobody has packed it anew.
            head.quant_method.process_weights_after_loading(head)
