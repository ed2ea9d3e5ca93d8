"""verl's PPO trainer without its training loop: workers, rollout engines, weight sync and checkpoints."""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import ray
import torch
import transfer_queue as tq
from numpy.typing import NDArray
from omegaconf import DictConfig, OmegaConf
from ray.exceptions import RayError
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import PPOTrainerSync
from verl.workers.utils.padding import response_from_nested

from astuner.backbone.ray_cluster.nodes import on_this_node, override_actor_options
from astuner.backbone.training.sync_certificate import SyncCertificate, probe_params
from astuner.backbone.verl.actor_worker import ActorWorker
from astuner.backbone.verl.batch_layout import RowFields, length_chunks, row_chunks, sample_fields, scored_sample
from astuner.backbone.verl.cluster import check_ray_resources, check_single_run
from astuner.backbone.verl.loss import RowLoss, row_loss
from astuner.backbone.verl.rollout_engine import generate_on
from astuner.backbone.verl.rules import EMBEDDED
from astuner.backbone.verl.training_engine import PACK
from astuner.config.root import AstunerConfig
from astuner.config.trainer import PackMode
from astuner.llm_engine.weight_digests import WeightDigests
from astuner.schema import Completion
from astuner.system.loop_thread import run_to_end

_PARTITION = "train"
_SAMPLE_FIELDS = ["prompts", "responses", "input_ids", "position_ids", "response_mask", "loss_mask"]
_LOSS_FIELDS = [
    "rollout_log_probs",
    "advantages",
    "old_log_probs",
    "call_starts",
    "call_ends",
    "row_scale",
    "mini_batch",
    "row",
    "sampler_log_probs",
]


@contextlib.contextmanager
def started_trainer(config: DictConfig, run: AstunerConfig, dtype: torch.dtype) -> Iterator[VerlTrainer]:
    """Start TransferQueue, workers and engines for the block. BackboneError: Ray lacks resources, or is used."""
    OmegaConf.resolve(config)
    loss = row_loss(run, dtype, other_engine=config.actor_rollout_ref.rollout.name != EMBEDDED)
    check_single_run()
    check_ray_resources(config)
    with contextlib.ExitStack() as stack:
        stack.callback(override_actor_options(_actor_options))
        tq.init(config.transfer_queue)
        # Before the callback below, which would close the other run's queue.
        check_single_run(own_queue=True)
        stack.callback(tq.close)
        trainer = VerlTrainer(config, loss, run.update.pack)
        # verl prints its progress.
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.init()
        yield trainer


def _actor_options(module: str, strategy: object) -> dict[str, Any]:
    """Return the options that replace an actor's own options, for actors of verl or TransferQueue.

    The request router and TransferQueue's controller run on this node and reserve no CPU. TransferQueue's storage
    reserves no CPU either, because the training workers on its node may need all of them.
    """
    package = module.partition(".")[0]
    if strategy is None and package in ("verl", "transfer_queue"):
        return on_this_node()
    return {"num_cpus": 0} if package == "transfer_queue" else {}


class VerlTrainer(PPOTrainerSync):
    """verl's workers and rollout engines.

    astuner supplies the tasks, the advantages and the training loop. verl's data loader, replay buffer and `fit` are
    not used.

    Attributes:
        engines_awake: whether the engines have weights and can serve requests.
    """

    def __init__(self, config: DictConfig, loss: RowLoss, pack: PackMode) -> None:
        """Set up the trainer. `init` starts the workers."""
        super().__init__(config=config)
        self._loss, self._pack = loss, pack
        self.engines_awake = False

    def init(self) -> None:
        """Start workers and engines. The engines sleep until the first weight sync."""
        super().init()
        self.actor_rollout_wg.set_loss_fn(self._loss)

    def _init_dataloader(self) -> None:
        """Do nothing: astuner selects the tasks of each step."""

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role in self.role_worker_mapping:
            self.role_worker_mapping[role] = ray.remote(ActorWorker)

    def _load_checkpoint(self) -> None:
        """Load nothing: astuner's training loop loads the checkpoint."""
        self.global_steps = 0

    @property
    def workers(self) -> int:
        """Number of data-parallel workers, which share a batch equally."""
        group = self.actor_rollout_wg
        if "actor" not in group._dispatch_info:
            group._dispatch_info["actor"] = group._query_dispatch_info("actor")
        return int(max(group._dispatch_info["actor"])) + 1

    @property
    def processes(self) -> int:
        """Number of training processes, including those that share a data-parallel worker's rows."""
        return int(self.actor_rollout_wg.world_size)

    @property
    def recomputes_old_logprobs(self) -> bool:
        """Whether the ratios of several mini-batches need the policy's logprobs before the update."""
        return self._loss.correction.old_from_trainer and not self._loss.own_ratio

    @property
    def shares_prefixes(self) -> bool:
        """Whether the workers may compute common prefixes of their rows once."""
        model = self.config.actor_rollout_ref.model
        attention = model.override_config.get("attn_implementation")
        return self._pack in ("auto", "tree") and model.use_remove_padding and attention == "sdpa"

    @property
    def servers(self) -> list[Any]:
        """The engines' Ray actors."""
        return [server for replica in self.llm_server_manager.get_replicas() for server in replica.servers]

    @property
    def router(self) -> Any:
        """The Ray actor that distributes the requests over the engines."""
        return self.llm_server_manager.global_load_balancer

    @property
    def engine_servers(self) -> list[Any]:
        """The Ray actor of each engine that takes requests; an engine's further nodes take none."""
        return [replica.servers[0] for replica in self.llm_server_manager.get_replicas()]

    def weight_digests(self, dtype: str) -> WeightDigests:
        """Return the checksums of all weights, with adapters merged, rounded to a dtype; see `weight_digests`."""
        digests: list[WeightDigests] = self.actor_rollout_wg.weight_digests(dtype)
        return next(filter(None, digests))

    def sync_weights(self, step: int) -> None:
        """Send the weights to the engines as policy version `step`, and wake the engines."""
        self.free_engines()  # they take weights while they sleep
        self.checkpoint_manager.update_weights(step)
        self.engines_awake = True

    def free_engines(self) -> None:
        """Make the engines release their memory, unless they sleep. A weight sync wakes them up."""
        if self.engines_awake:
            self.checkpoint_manager.sleep_replicas()
            self.engines_awake = False

    def put(self, keys: list[str], rows: Iterable[RowFields]) -> None:
        """Store fields of new or existing rows, which are read and sent in bounded requests."""
        start = 0
        for part in row_chunks(rows):
            tags = [{"status": "success", "seq_len": len(row["input_ids"])} for row in part if "input_ids" in row]
            of_part = keys[start : start + len(part)]
            tq.kv_batch_put(keys=of_part, partition_id=_PARTITION, fields=_stack(part), tags=tags or None)
            start += len(part)

    def get(self, keys: list[str], fields: list[str]) -> TensorDict:
        """Return fields of rows."""
        return tq.kv_batch_get(keys=keys, partition_id=_PARTITION, select_fields=fields)

    def clear(self, keys: list[str]) -> None:
        """Delete rows."""
        if keys:
            tq.kv_clear(keys=keys, partition_id=_PARTITION)

    @contextlib.contextmanager
    def rows_cleared(self, keys: Callable[[], list[str]]) -> Iterator[None]:
        """Delete rows after the block; `keys` returns theirs.

        They stay after a Ray error, which ends the run: a TransferQueue storage may have died, too, and each request to
        it takes minutes to fail.
        """
        try:
            yield
        except RayError:
            raise
        except BaseException:
            self.clear(keys())
            raise
        self.clear(keys())

    def _batch(self, keys: list[str], lengths: list[int], fields: list[str], **extra_info: object) -> KVBatchMeta:
        """Return a reference to stored rows, which verl's workers resolve; `extra_info` describes the whole batch."""
        return KVBatchMeta(
            keys=keys,
            tags=[{"seq_len": length} for length in lengths],
            partition_id=_PARTITION,
            fields=fields,
            extra_info={
                "temperature": self.config.actor_rollout_ref.rollout.temperature,
                PACK: self._pack,
                **extra_info,
            },
        )

    def policy_outputs(
        self, name: Literal["log_probs", "entropy"], keys: list[str], lengths: list[int]
    ) -> list[Tensor]:
        """Return the policy's logprobs or entropies at the response tokens, one float32 [R] tensor per row. The row
        count must be divisible by the number of data-parallel workers.
        """
        batch = self._batch(keys, lengths, _SAMPLE_FIELDS, calculate_entropy=name == "entropy", compute_loss=False)
        self.actor_rollout_wg.compute_log_prob(batch)
        outputs: list[Tensor] = []
        for part in length_chunks(lengths):
            stored = self.get(keys[part.start : part.stop], [name, "response_mask"])
            outputs += response_from_nested(stored[name], stored["response_mask"]).float().unbind()
        return outputs

    def score(self, name: str, sequences: Sequence[tuple[Sequence[int] | NDArray[np.int32], int]]) -> list[Tensor]:
        """Return the policy's logprobs at the ends of token sequences, one float32 tensor for each.

        Args:
            name: the start of the rows' keys, which are deleted at the end.
            sequences: token ids, and the number of the first ones that are not scored, at least 1.
        """
        if not sequences:
            return []
        # The number of rows must be divisible by the number of data-parallel workers.
        rows = [*sequences, *[sequences[0]] * (-len(sequences) % self.workers)]
        keys = [f"{name}-{number}" for number in range(len(rows))]
        self.put(keys, (sample_fields(scored_sample(ids, start)) for ids, start in rows))
        with self.rows_cleared(lambda: keys):
            return self.policy_outputs("log_probs", keys, [len(ids) for ids, _ in rows])[: len(sequences)]

    def reference_logprobs(self, keys: list[str], lengths: list[int]) -> list[Tensor]:
        """Return the reference model's logprobs, as `policy_outputs`, and store them as `ref_log_prob`."""
        self._compute_ref_log_prob(self._batch(keys, lengths, _SAMPLE_FIELDS), {})
        parts = (self.get(keys[part.start : part.stop], ["ref_log_prob"]) for part in length_chunks(lengths))
        return [row.float() for stored in parts for row in stored["ref_log_prob"].unbind()]

    def update(self, keys: list[str], lengths: list[int], mini_batch_size: int, rate: float) -> dict[str, Any]:
        """Do the optimizer steps of a training step.

        Args:
            keys: keys of the rows, ordered by worker and then mini-batch.
            mini_batch_size: number of rows in a mini-batch, over all workers.

        Returns:
            verl's metrics: lists over mini-batches and micro-batches.
        """
        self.actor_rollout_wg.set_learning_rate(rate)
        optional = {
            "ref_log_prob": self._loss.kl_coef > 0,
            "entropy_threshold": self._loss.algorithm.selects_by_entropy,
        }
        batch = self._batch(
            keys,
            lengths,
            _SAMPLE_FIELDS + _LOSS_FIELDS + [name for name, is_needed in optional.items() if is_needed],
            calculate_entropy=True,
            global_batch_size=mini_batch_size,
            mini_batch_size=mini_batch_size,
            epochs=1,
            seed=0,
            dataloader_kwargs={"shuffle": False},
        )
        metrics: dict[str, Any] = self.actor_rollout_wg.update_actor(batch)["metrics"]
        return metrics

    def save(self, folder: Path, step: int) -> None:
        """Save model, optimizer and random state with verl's checkpoint manager."""
        self.actor_rollout_wg.save_checkpoint(str(folder), None, step, max_ckpt_to_keep=None)

    def load(self, folder: Path) -> None:
        """Load a checkpoint that `save` wrote."""
        self.actor_rollout_wg.load_checkpoint(str(folder))

    def save_model(self, folder: Path, dtype: str) -> None:
        """Save the model as a Hugging Face folder without tokenizer."""
        self.actor_rollout_wg.save_model(str(folder), dtype)


def certify_sync(
    trainer: VerlTrainer, certificate: SyncCertificate, step: int, prompt_ids: list[int], temperature: float
) -> None:
    """Check that every engine samples with the trainer's weights, after a sync.

    Embedded engines return the checksums of their weights. Other engines cannot, so the logprobs of a few tokens
    after `prompt_ids` (at least one) are compared each time. BackboneError: an engine does not. ModelError: an
    engine has failed.
    """
    has_digests = trainer.config.actor_rollout_ref.rollout.name == EMBEDDED
    if has_digests:
        with certificate.timed():
            certificate.begin(trainer.weight_digests(str(certificate.dtype).removeprefix("torch.")))
            found = ray.get([server.weight_digests.remote() for server in trainer.engine_servers])
            for number, digests in enumerate(found, 1):
                certificate.check_digests(f"engine {number} of {len(found)}", step, digests)
    if not has_digests or certificate.probe_is_due:
        with certificate.timed_probe():
            _compare_logprobs(trainer, certificate, step, prompt_ids, temperature)


def _compare_logprobs(
    trainer: VerlTrainer, certificate: SyncCertificate, step: int, prompt_ids: list[int], temperature: float
) -> None:
    """Let each engine sample a completion of the prompt, and compare its logprobs with the trainer's."""
    servers = trainer.engine_servers
    params = probe_params(temperature, trainer.config.actor_rollout_ref.rollout.max_model_len - len(prompt_ids))

    async def sample_completions() -> list[Completion]:
        return await asyncio.gather(*(generate_on(server, prompt_ids, params) for server in servers))

    completions = run_to_end(sample_completions())
    sequences = [((*prompt_ids, *completion.token_ids), len(prompt_ids)) for completion in completions]
    logprobs = trainer.score(f"sync-{step}", sequences)
    for number, (completion, trained) in enumerate(zip(completions, logprobs, strict=True), 1):
        certificate.check_logprobs(f"engine {number} of {len(servers)}", step, completion.logprobs, trained.tolist())


def _stack(rows: Sequence[RowFields]) -> TensorDict:
    fields = {}
    for name, first in rows[0].items():
        values = [row[name] for row in rows]
        # Rows differ in length, so tensors are nested; scalars are stacked.
        fields[name] = (
            torch.stack(values) if first.dim() == 0 else torch.nested.as_nested_tensor(values, layout=torch.jagged)
        )
    return TensorDict(fields, batch_size=[len(rows)])
