"""astuner's embedded engine as one of verl's rollout engines, each in a Ray actor of its own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping
from typing import Any

import ray
import torch
from torch import Tensor
from verl.workers.rollout import base as rollout_base
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

from astuner.backbone.causal_lm import load_causal_lm
from astuner.backbone.verl.rules import EMBEDDED
from astuner.llm_engine.embedded import EmbeddedEngine
from astuner.run_record import redact_output
from astuner.schema import SamplingParams


class EmbeddedServer:
    """An embedded engine behind the methods that verl's replicas and clients call; a Ray actor."""

    def __init__(self, model_path: str, dtype: str, max_model_len: int, max_num_seqs: int) -> None:
        redact_output()
        model = load_causal_lm(model_path, getattr(torch, dtype))
        self._engine = EmbeddedEngine(model, max_model_len=max_model_len, max_num_seqs=max_num_seqs)

    async def ready(self) -> bool:
        """Return once the engine is there.

        Raises:
            ModelError: it can no longer answer.
        """
        self._engine.raise_if_broken()
        return True

    async def generate(
        self, prompt_ids: list[int], sampling_params: Mapping[str, Any], request_id: str, **media: object
    ) -> TokenOutput:
        """Sample one completion.

        Args:
            prompt_ids: at least one token id.
            sampling_params: temperature, top_p, top_k, max_tokens, stop_token_ids and seed.
            request_id: not looked at.
            media: None each; images and the like are not known here.

        Raises:
            AstunerError: as `EmbeddedEngine.generate`.
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
            extra_fields={"global_steps": completion.policy_version},
        )

    async def load_weights(self, weights: Mapping[str, Tensor], policy_version: int) -> None:
        """Sample all further requests with these weights.

        Raises:
            ModelError: they do not fit the model.
        """
        await asyncio.to_thread(self._engine.update_weights, weights, policy_version)

    async def sleep(self) -> None:
        """Give back the memory of cached prefixes."""
        self._engine.free_cache()

    async def nothing(self, *args: object, **kwargs: object) -> None:
        """Do nothing: weights and cache are in host memory, and requests need no permission."""

    wake_up = clear_kv_cache = release_kv_cache = resume_kv_cache = nothing
    abort_all_requests = resume_generation = start_profile = stop_profile = nothing


class EmbeddedReplica(RolloutReplica):
    """One embedded engine, beside the training workers whose weights it gets."""

    async def launch_servers(self) -> None:
        """Start the engine's actor."""
        config = self.config
        server = (
            ray.remote(EmbeddedServer)
            .options(name=_actor_name(self.replica_rank), num_cpus=0, max_concurrency=self.max_concurrency)
            .remote(self.model_config.path, config.dtype, config.max_model_len, config.max_num_seqs)
        )
        await server.ready.remote()
        self.servers = [server]
        self._server_handle = server
        self._server_address = _actor_name(self.replica_rank)


class EmbeddedAdapter(BaseRollout):
    """Lives in the training workers, and hands their weights to the engine."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        workers = self.config.tensor_model_parallel_size * self.config.data_parallel_size
        rank = int(os.environ["RANK"])
        self.replica_rank = rank // workers if replica_rank == -1 else replica_rank
        self.is_leader_rank = rank % workers == 0

    async def resume(self, tags: list[str]) -> None:
        """Do nothing: weights and cache are always in memory."""

    async def release(self) -> None:
        """Do nothing."""

    @torch.no_grad()
    async def update_weights(
        self, weights: Iterable[tuple[str, Tensor]], global_steps: int | None = None, **kwargs: object
    ) -> None:
        """Hand over all weights, under the names that transformers gives them.

        Args:
            weights: each is gathered from all workers as it is drawn, so that all of them must draw all.
            global_steps: the policy version.
            kwargs: not looked at; adapters are merged already.
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
    """Make the engine known to verl in this process."""
    RolloutReplicaRegistry.register(EMBEDDED, lambda: EmbeddedReplica)
    # verl has no function for this one.
    rollout_base._ROLLOUT_REGISTRY[EMBEDDED, "async"] = f"{__name__}.{EmbeddedAdapter.__name__}"
