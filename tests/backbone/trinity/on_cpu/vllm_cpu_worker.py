"""vLLM's CPU worker under Trinity, for tests only."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker


class CpuWorker(CPUWorker):
    """Loads weights from Trinity's synchronizer or from disk, as the first rank of Trinity's worker does."""

    def apply_patches(self) -> None:
        """Do nothing: Trinity's patches are for prompt logprobs, which astuner does not use."""

    def load_new_weights(self, method: str, folder: str, namespace: str) -> None:
        """Load the trainer's newest weights for new requests."""
        import ray
        from trinity.common.models.utils import load_state_dict_iterator
        from trinity.manager.synchronizer import Synchronizer

        weights: list[tuple[str, Any]]
        if method == "checkpoint":
            weights = list(load_state_dict_iterator(folder))
        else:
            synchronizer = Synchronizer.get_actor(namespace=namespace)
            weights = list(ray.get(synchronizer.get_model_state_dict.remote())[0].items())
        self.reload_weights(weights_iterator=iter(weights))
        head: Any = getattr(self.model_runner.get_model(), "lm_head", None)
        if hasattr(head, "cpu_linear"):
            # A head that is tied to the embedding is not in the list of weights, so that it must be packed again here.
            head.quant_method.process_weights_after_loading(head)
