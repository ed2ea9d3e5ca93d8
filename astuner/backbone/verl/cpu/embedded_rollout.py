"""astuner's embedded engine as a rollout engine of verl, in a Ray actor."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import Tensor
from verl.workers.rollout import base as rollout_base
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

from astuner.backbone.ray_cluster.worker_server import use_configured_threads
from astuner.backbone.verl.rules import EMBEDDED, SAMPLER_LOGPROBS
from astuner.llm_engine.causal_lm import load_causal_lm
from astuner.llm_engine.embedded.engine import EmbeddedEngine
from astuner.schema import SamplingParams
from astuner.system.redaction.output import redact_output


class EmbeddedServer:
    """A Ray actor with an embedded engine and the methods that verl's replicas and clients call."""

    def __init__(self, model_path: str, dtype: str, max_model_len: int, max_num_seqs: int) -> None:
        redact_output()
        use_configured_threads()
        model = load_causal_lm(model_path, getattr(torch, dtype))
        self._engine = EmbeddedEngine(model, max_model_len=max_model_len, max_num_seqs=max_num_seqs)

    async def ready(self) -> bool:
        """Return True if the engine can serve requests; raise ModelError if it has failed."""
        self._engine.raise_if_broken()
        return True

    async def generate(
        self, prompt_ids: list[int], sampling_params: Mapping[str, Any], request_id: str, **media: object
    ) -> TokenOutput:
        """Sample one completion.

        Args:
            sampling_params: temperature, top_p, top_k, max_tokens, stop_token_ids and seed.
            request_id: ignored.
            media: ignored; verl passes None for images and videos.

        Raises:
            AstunerError: see `EmbeddedEngine.generate`.
        """
        params = SamplingParams(
            temperature=sampling_params["temperature"],
            top_p=sampling_params["top_p"],
            top_k=sampling_params["top_k"],
            max_tokens=sampling_params["max_tokens"],
            stop_token_ids=tuple(sampling_params["stop_token_ids"]),
            seed=sampling_params.get("seed"),
        )
        completion = await self._engine.generate(prompt_ids, params)
        return TokenOutput(
            token_ids=list(completion.token_ids),
            log_probs=list(completion.logprobs),
            stop_reason="completed",
            extra_fields={
                "global_steps": completion.policy_version,
                SAMPLER_LOGPROBS: list(completion.sampler_logprobs),
            },
        )

    async def load_weights(self, weights: Mapping[str, Tensor], policy_version: int) -> None:
        """Load weights for all further requests; raise ModelError if they do not fit the model."""
        await asyncio.to_thread(self._engine.update_weights, weights, policy_version)

    async def weight_digests(self) -> dict[str, int]:
        """Return the checksums of the weights that the engine samples with."""
        return await asyncio.to_thread(self._engine.weight_digests)

    async def sleep(self) -> None:
        """Release the memory of the prefix cache."""
        self._engine.free_cache()

    async def no_op(self, *args: object, **kwargs: object) -> None:
        """Do nothing: weights and cache stay in host memory, and generation is never paused."""

    wake_up = clear_kv_cache = release_kv_cache = resume_kv_cache = no_op
    abort_all_requests = resume_generation = start_profile = stop_profile = no_op


class EmbeddedReplica(RolloutReplica):
    """verl's replica of one embedded engine, colocated with the training workers that send it weights."""

    async def launch_servers(self) -> None:
        """Start the engine's actor on the node of the first worker."""
        config = self.config
        node = await self.workers[0].__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id())
        server = (
            ray.remote(EmbeddedServer)
            .options(
                name=_actor_name(self.replica_rank),
                num_cpus=0,
                max_concurrency=self.max_concurrency,
                # Ray would start it on a random node, whose loss would end the run.
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            )
            .remote(self.model_config.path, config.dtype, config.max_model_len, config.max_num_seqs)
        )
        await server.ready.remote()
        self.servers = [server]
        self._server_handle = server
        self._server_address = _actor_name(self.replica_rank)


class EmbeddedAdapter(BaseRollout):
    """Sends the weights of the training workers, in whose processes it lives, to the engine."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        workers = self.config.tensor_model_parallel_size * self.config.data_parallel_size
        rank = int(os.environ["RANK"])
        self.replica_rank = rank // workers if replica_rank == -1 else replica_rank
        self.is_leader_rank = rank % workers == 0

    async def resume(self, tags: list[str]) -> None:
        """Do nothing: weights and cache stay in memory."""

    async def release(self) -> None:
        """Do nothing: weights and cache stay in memory."""

    @torch.no_grad()
    async def update_weights(
        self, weights: Iterable[tuple[str, Tensor]], global_steps: int | None = None, **kwargs: object
    ) -> None:
        """Send all weights, under their names in transformers.

        Args:
            weights: an iterator that gathers each weight from all workers, so that every worker must exhaust it.
            kwargs: ignored; adapters are already merged.
        """
        gathered = {}
        for name, tensor in weights:
            if self.is_leader_rank:
                gathered[name] = tensor.detach().to("cpu")
        if self.is_leader_rank:
            server = ray.get_actor(_actor_name(self.replica_rank))
            await server.load_weights.remote(gathered, global_steps or 0)


def _actor_name(replica_rank: int) -> str:
    return f"{EMBEDDED}_{replica_rank}"


def register() -> None:
    """Register the engine with verl in this process."""
    RolloutReplicaRegistry.register(EMBEDDED, lambda: EmbeddedReplica)
    # verl has no public function for this registry.
    rollout_base._ROLLOUT_REGISTRY[EMBEDDED, "async"] = f"{__name__}.{EmbeddedAdapter.__name__}"
