"""Samples and what is known of them as the fields of TransferQueue, from which verl's workers take them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

from astuner.backbone.rows import Row, prompt_length, token_advantages
from astuner.schema import Sample

Fields = Mapping[str, Tensor]

PADDING_LENGTH = 2
"""Tokens of a row that fills up."""


def sample_fields(sample: Sample) -> Fields:
    """Return a sample as verl has it: what precedes the first trained token is the prompt, the rest the response.

    Args:
        sample: a row of N tokens, P of them prompt.

    Returns:
        `prompts` [P], `responses` [R], `input_ids` and `position_ids` [P + R], all int64; of the response, [R] each:
        `response_mask` and `loss_mask` (int64: how often a token is trained) and `rollout_log_probs` (float32).
    """
    start = prompt_length(sample)
    ids = torch.tensor(sample.token_ids)
    mask = torch.tensor(sample.loss_mask[start:])
    return {
        "prompts": ids[:start],
        "responses": ids[start:],
        "input_ids": ids,
        "position_ids": torch.tensor(sample.position_ids),
        "response_mask": mask,
        "loss_mask": mask.clone(),
        "rollout_log_probs": torch.tensor(sample.logprobs[start:], dtype=torch.float32),
    }


def padding_fields(token_id: int) -> Fields:
    """Return the shortest row, which trains nothing and makes a batch divisible."""
    return {
        "prompts": torch.tensor([token_id]),
        "responses": torch.tensor([token_id]),
        "input_ids": torch.tensor([token_id] * PADDING_LENGTH),
        "position_ids": torch.arange(PADDING_LENGTH),
        "response_mask": torch.zeros(1, dtype=torch.int64),
        "loss_mask": torch.zeros(1, dtype=torch.int64),
        "rollout_log_probs": torch.zeros(1),
    }


def credit_fields(row: Row, number: int, prompt: int, old_logprobs: Tensor, scale: float, mini_batch: int) -> Fields:
    """Return what the loss needs beside the sample.

    Args:
        row: with the advantages of its calls.
        number: its place in the step.
        prompt: P.
        old_logprobs: [R] float32.
        scale: the factor of its loss mask.
        mini_batch: the number of its mini-batch in the step.

    Returns:
        `advantages` and `old_log_probs` [R] float32; `call_starts` and `call_ends` [calls] int64, in the response;
        `row_scale` float32, `mini_batch` and `row` (its number) int64, scalars.
    """
    calls = torch.tensor(row.calls, dtype=torch.int64).reshape(-1, 2) - prompt
    return {
        "advantages": token_advantages([row], len(row.token_ids))[0, prompt:],
        "old_log_probs": old_logprobs,
        "call_starts": calls[:, 0].contiguous(),
        "call_ends": calls[:, 1].contiguous(),
        "row_scale": torch.tensor(scale, dtype=torch.float32),
        "mini_batch": torch.tensor(mini_batch),
        "row": torch.tensor(number),
    }


def padding_credit(mini_batch: int, *, reference: bool) -> Fields:
    """Return the same for a row that fills up, with a `ref_log_prob` if there is a `reference`."""
    fields = {
        "advantages": torch.zeros(1),
        "old_log_probs": torch.zeros(1),
        # A call of no length: fields of no length are none to TransferQueue.
        "call_starts": torch.zeros(1, dtype=torch.int64),
        "call_ends": torch.zeros(1, dtype=torch.int64),
        "row_scale": torch.tensor(0.0),
        "mini_batch": torch.tensor(mini_batch),
        "row": torch.tensor(-1),
    }
    return fields | {"ref_log_prob": torch.zeros(1)} if reference else fields


def as_batch(rows: Sequence[Fields]) -> TensorDict:
    """Return rows as a TensorDict, whatever their lengths: nested, and scalars stacked."""
    fields = {}
    for name, first in rows[0].items():
        values = [row[name] for row in rows]
        fields[name] = (
            torch.stack(values) if first.dim() == 0 else torch.nested.as_nested_tensor(values, layout=torch.jagged)
        )
    return TensorDict(fields, batch_size=[len(rows)])
