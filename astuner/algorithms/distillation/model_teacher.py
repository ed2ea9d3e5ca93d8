"""A teacher that is a model in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from astuner.algorithms.distillation.teacher import TeacherSequence
from astuner.errors import ModelError
from astuner.llm_engine.context_length import context_length


class ModelTeacher:
    """Scores tokens with a causal language model of transformers."""

    def __init__(
        self,
        model: Any,
        max_tokens: int,
        autocast: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        """Create the teacher.

        Args:
            model: the model. It is used as it is at each call, so a model in training is its own teacher.
            max_tokens: padded tokens of one forward pass; a longer sequence is computed alone.
            autocast: returns the context of the forward passes.
        """
        self._model = model
        self._max_tokens = max_tokens
        self._autocast = autocast

    def logprobs(self, sequences: Sequence[TeacherSequence]) -> list[NDArray[np.float32]]:
        """Score the spans (see `Teacher.logprobs`).

        Raises:
            ModelError: a sequence is longer than the model's context, or has a token that the model does not have.
        """
        for sequence in sequences:
            self._check(sequence)
        results = [np.zeros(len(sequence.token_ids), np.float32) for sequence in sequences]
        was_training = self._model.training
        self._model.eval()
        try:
            with torch.no_grad(), self._autocast():
                for batch in self._batches(sequences):
                    self._score([sequences[index] for index in batch], [results[index] for index in batch])
        finally:
            self._model.train(was_training)
        return results

    def close(self) -> None:
        """Drop the model."""
        self._model = None

    def _check(self, sequence: TeacherSequence) -> None:
        limit, length = context_length(self._model.config), len(sequence.token_ids)
        if limit is not None and length > limit:
            raise ModelError(
                f"trainer_common.distillation.teacher has a context of {limit} tokens, and a sequence to score has "
                f"{length}; name a teacher with a longer context, or lower rollout.max_model_len"
            )
        size = self._model.get_input_embeddings().num_embeddings
        if (largest := max(sequence.token_ids)) >= size:
            raise ModelError(
                f"trainer_common.distillation.teacher has {size} token ids, and a sequence to score has the id "
                f"{largest}; name a teacher with the tokenizer of model.path"
            )

    def _batches(self, sequences: Sequence[TeacherSequence]) -> Iterator[list[int]]:
        """Yield the indexes of similarly long sequences, as many as fit into one forward pass."""
        batch: list[int] = []
        for index in sorted(range(len(sequences)), key=lambda index: -len(sequences[index].token_ids)):
            # The first sequence of a batch is its longest one.
            if batch and (len(batch) + 1) * len(sequences[batch[0]].token_ids) > self._max_tokens:
                yield batch
                batch = []
            batch.append(index)
        if batch:
            yield batch

    def _score(self, sequences: Sequence[TeacherSequence], results: Sequence[NDArray[np.float32]]) -> None:
        width = max(len(sequence.token_ids) for sequence in sequences)
        # Padding is on the right, so no token of a sequence attends to it.
        token_ids = np.zeros((len(sequences), width), np.int64)
        scored = np.zeros((len(sequences), width), bool)
        temperatures = np.ones((len(sequences), width), np.float32)
        for index, sequence in enumerate(sequences):
            token_ids[index, : len(sequence.token_ids)] = sequence.token_ids
            for (start, end), temperature in zip(sequence.spans, sequence.temperatures, strict=True):
                scored[index, start:end] = True
                temperatures[index, start:end] = temperature or 1.0
        rows, columns = scored.nonzero()
        needed, places = np.unique(columns - 1, return_inverse=True)
        device = self._model.get_input_embeddings().weight.device
        logits = self._model(
            input_ids=torch.from_numpy(token_ids).to(device),
            logits_to_keep=torch.from_numpy(needed).to(device),
            use_cache=False,
        ).logits
        chosen = logits[torch.from_numpy(rows).to(device), torch.from_numpy(places).to(device)].float()
        chosen = chosen / torch.from_numpy(temperatures[rows, columns]).to(device)[:, None]
        targets = torch.from_numpy(token_ids[rows, columns]).to(device)
        logprobs = -torch.nn.functional.cross_entropy(chosen, targets, reduction="none")
        for row, column, value in zip(rows.tolist(), columns.tolist(), logprobs.tolist(), strict=True):
            results[row][column] = value
