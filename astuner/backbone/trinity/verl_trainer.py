"""Trinity's trainer with verl's workers: equal-length batches for the workers, and the model of their checkpoints."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from trinity.common.config import Config
from trinity.common.experience import Experience
from trinity.trainer.trainer import Trainer

from astuner.backbone.packing.attention import imports_flash_attention
from astuner.backbone.trinity.advantage_fn import CALLS, COUNTS, REFERENCE, SCALE, STEP, padding_experience
from astuner.backbone.trinity.metrics import DISTINCT_TOKENS
from astuner.context_tracker.packing import count_distinct_prefixes, encode_ids
from astuner.errors import ModelError, first_line
from astuner.llm_engine.causal_lm import load_causal_lm


class WholeBatchTrainer(Trainer):
    """Takes one optimizer step over all of a trainer step's experiences, and writes each step's checkpoint once.

    The stock trainer splits them into parts of `buffer.train_batch_size` and takes an optimizer step for each. When its
    training ends, it writes the last checkpoint again, to the same files.
    """

    _saved_step: int | None = None

    def __init__(self, config: Config) -> None:
        """Create the trainer from Trinity's configuration."""
        from trinity.trainer.verl import trainer

        from astuner.backbone.trinity.verl_worker import BoundedWorker

        trainer.TrinityActorRolloutRefWorker = BoundedWorker
        if not imports_flash_attention():
            pack_without_flash_attention()
        super().__init__(config)

    async def prepare(self) -> None:
        """Load the model, or the checkpoint from which the run resumes."""
        await super().prepare()
        self._saved_step = self.train_step_num or None

    async def save_checkpoint(self, block_until_saved: bool = False, save_as_hf: bool = False) -> dict[str, Any]:
        """Save the current step, unless it is saved. A checkpoint of the run may have links to the saved files."""
        if self._saved_step == self.train_step_num:
            await self.engine.wait_for_save()
            return {}
        metrics: dict[str, Any] = await super().save_checkpoint(block_until_saved, save_as_hf)
        self._saved_step = self.train_step_num
        return metrics

    async def train_step(self, exps: list[Experience]) -> dict[str, Any]:
        """Train on a mini-batch."""
        cluster = self.config.cluster
        gpus = cluster.trainer_node_num * cluster.trainer_gpu_num_per_node
        rows = worker_rows(exps, gpus // self.config.trainer.ulysses_sequence_parallel_size)
        self.engine.config.actor.ppo_mini_batch_size = len(rows)
        metrics: dict[str, Any] = await super().train_step(rows)
        return metrics | {DISTINCT_TOKENS: count_distinct_prefixes([encode_ids(exp.tokens.numpy()) for exp in exps])}


def pack_without_flash_attention() -> None:
    """Make this process remove padding with PyTorch functions.

    verl 0.8 takes these functions from flash-attention, even if attention is PyTorch's and rows are padded.
    """
    from verl.utils import attention_utils
    from verl.utils import npu_flash_attn_utils as torch_functions

    functions = (
        torch_functions.index_first_axis,
        torch_functions.pad_input,
        torch_functions.rearrange,
        torch_functions.unpad_input,
    )
    attention_utils._get_attention_functions = lambda: functions


def worker_rows(experiences: Sequence[Experience], workers: int) -> list[Experience]:
    """Pad a mini-batch to a multiple of `workers` equally long rows; experiences are changed in place.

    Args:
        experiences: as `EpisodeAdvantages` returns them.
        workers: number of data-parallel workers, over which gradients are averaged.
    """
    count = len(experiences)
    first = experiences[0]
    # Experiences contain zeros if the trainer computes no reference logprobs.
    use_reference = REFERENCE not in first.info
    padding = [
        padding_experience(first.info[STEP], first, use_reference=use_reference) for _ in range(-count % workers)
    ]
    rows = [*experiences, *padding]
    tokens, calls = (max(len(row.info[key]) for row in rows) for key in (COUNTS, CALLS))
    for row in rows:
        row.info[COUNTS] = _padded(row.info[COUNTS], tokens, 0)
        row.info[CALLS] = _padded(row.info[CALLS], calls, (0, 0, 0))
        # The scales are made for a trainer that averages over experiences.
        row.info[SCALE] = [row.info[SCALE][0] / count * workers]
        if not use_reference:
            row.info[REFERENCE] = _padded(row.info[REFERENCE], tokens, 0.0)
        row.custom_fields = [
            replace(field, destination_field="ref_log_prob") if field.source_field == REFERENCE else field
            for field in row.custom_fields
        ]
    return rows


def _padded(values: Sequence[Any], length: int, padding: object) -> list[Any]:
    return [*values, *[padding] * (length - len(values))]


@torch.no_grad()
def save_model(base: str, actor: Path, folder: Path) -> None:
    """Merge the shards that verl's FSDP workers have left in `actor`; write the model, or raise ModelError."""
    from trinity.common.models.utils import load_fsdp_state_dict_from_verl_checkpoint

    model = load_causal_lm(base, torch.float32)
    # This logger warns about torch.compile, which is not used here.
    logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # verl's progress bars
            trained: dict[str, Tensor] = load_fsdp_state_dict_from_verl_checkpoint(str(actor))
        model.load_state_dict(trained)
    # verl's merger raises errors of many types.
    except Exception as error:
        raise ModelError(
            f"the checkpoint shards in {actor} cannot be merged into a model: {first_line(error)}; they are not deleted"
        ) from error
    model.save_pretrained(folder)
