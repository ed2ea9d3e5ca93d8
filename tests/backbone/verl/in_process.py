"""verl's training engine in this process: its code around the model and the loss, without Ray, FSDP and TransferQueue.

Imported only where verl is installed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed
import verl.workers.engine.fsdp.transformer_impl as fsdp
from omegaconf import OmegaConf
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl.plugin.platform import platform_manager
from verl.utils import tensordict_utils

from astuner.backbone.verl.cpu.platform import CpuPlatform
from astuner.backbone.verl.loss import RowLoss
from astuner.backbone.verl.trainer import VerlTrainer
from astuner.backbone.verl.training_engine import PACK, TrainingEngine, register
from astuner.config.trainer import PackMode


@contextlib.contextmanager
def cpu_process_group() -> Iterator[None]:
    """Make this process the only worker of verl's engines, on the CPU."""
    original = platform_manager._current_platform
    platform_manager._current_platform = CpuPlatform()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
        platform_manager._current_platform = original


class InProcessTrainer(VerlTrainer):
    """Stores rows in a dictionary, and computes with verl's engine; keeps gradients instead of making steps.

    Attributes:
        workers: 1.
        worker: the engine and its rows.
    """

    workers = 1
    shares_prefixes = False  # with one worker, it has no effect

    def __init__(
        self,
        module: torch.nn.Module,
        loss: Callable[..., Any],
        *,
        remove_padding: bool,
        pack: PackMode = "leaf",
        token_budget: int = 40,
    ) -> None:
        """Use a model.

        Args:
            module: the model.
            loss: the loss.
            remove_padding: whether the rows of a micro-batch are one sequence, or padded.
            pack: whether its common prefixes are computed once.
            token_budget: maximum number of computed tokens of a micro-batch.
        """
        self._loss, self._pack = loss, pack
        self.config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"temperature": 1.0}}})
        self.worker = self.actor_rollout_wg = _Worker(module, loss, remove_padding, pack, token_budget)

    def put(self, keys: list[str], rows: list[Mapping[str, Tensor]]) -> None:
        for key, row in zip(keys, rows, strict=True):
            self.worker.rows.setdefault(key, {}).update(row)

    def get(self, keys: list[str], fields: list[str]) -> TensorDict:
        return self.worker.batch(keys, fields)

    def clear(self, keys: list[str]) -> None:
        for key in keys:
            del self.worker.rows[key]


class _Engine(TrainingEngine):
    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.engine_config = SimpleNamespace(entropy_checkpointing=False, entropy_from_logits_with_chunking=False)
        self.compute_entropy_from_logits = fsdp.verl_F.entropy_from_logits
        self.ulysses_device_mesh, self.use_ulysses_sp, self.ulysses_sequence_parallel_size = None, False, 1
        self.pad_to_length, self._autocast_dtype = False, torch.float32


class _Worker:
    """verl's worker, as `VerlTrainer` calls it. `gradient` is that of all weights after the last mini-batch."""

    def __init__(
        self,
        module: torch.nn.Module,
        loss: Callable[..., Any],
        remove_padding: bool,
        pack: PackMode,
        token_budget: int,
    ) -> None:
        self.rows: dict[str, dict[str, Tensor]] = {}
        self.gradient = torch.zeros(0)
        self._module, self._loss, self._remove_padding = module, loss, remove_padding
        self._pack, self._token_budget = pack, token_budget
        register()
        self._engine = _Engine(module)
        if remove_padding:
            self._engine.enable_packing(module)

    def batch(self, keys: list[str], fields: list[str]) -> TensorDict:
        """Return fields of rows, nested where rows differ in length."""
        columns = {name: [self.rows[key][name] for key in keys] for name in fields}
        stacked = {
            name: torch.stack(column)
            if column[0].dim() == 0
            else torch.nested.as_nested_tensor(column, layout=torch.jagged)
            for name, column in columns.items()
        }
        return TensorDict(stacked, batch_size=[len(keys)])

    def set_learning_rate(self, rate: float) -> None:
        pass

    def compute_log_prob(self, batch: KVBatchMeta) -> None:
        output = self._compute(batch, batch.keys, None)["model_output"]
        for name in ("log_probs", *(["entropy"] if batch.extra_info["calculate_entropy"] else [])):
            for key, row in zip(batch.keys, output[name].unbind(), strict=True):
                self.rows[key][name] = row

    def update_actor(self, batch: KVBatchMeta) -> dict[str, Any]:
        metrics: dict[str, Any] = {}
        size = batch.extra_info["mini_batch_size"]
        for start in range(0, len(batch.keys), size):
            self._module.zero_grad()
            output = self._compute(batch, batch.keys[start : start + size], self._loss)
            parameters = [parameter for parameter in self._module.parameters() if parameter.grad is not None]
            self.gradient = torch.cat([parameter.grad.flatten() for parameter in parameters])
            for name, value in {**output["metrics"], "grad_norm": float(self.gradient.norm())}.items():
                metrics.setdefault(name, []).append(value)
        return {"metrics": metrics}

    def _compute(self, batch: KVBatchMeta, keys: list[str], loss: RowLoss | None) -> dict[str, Any]:
        settings = {name: batch.extra_info[name] for name in ("temperature", "calculate_entropy")}
        return self.compute(keys, batch.fields, loss, **settings)

    def compute(
        self,
        keys: list[str],
        fields: list[str],
        loss: Callable[..., Any] | None,
        *,
        temperature: float = 1.0,
        calculate_entropy: bool = False,
    ) -> dict[str, Any]:
        """Compute rows in micro-batches, and add up the gradients of the loss, if there is one."""
        data = self.batch(keys, fields)
        tensordict_utils.assign_non_tensor(
            data,
            temperature=temperature,
            calculate_entropy=calculate_entropy,
            use_remove_padding=self._remove_padding,
            use_dynamic_bsz=True,
            max_token_len_per_gpu=self._token_budget,
            **{PACK: self._pack},
        )
        output: dict[str, Any] = self._engine.forward_backward_batch(data, loss, forward_only=loss is None)
        return output
