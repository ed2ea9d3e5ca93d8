"""Faults that are injected into components of the trainer and the engine, by replacing one of their functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch

from astuner.schema import Completion, Sample, SamplingParams


def mask_off_by_one() -> None:
    """Shift the loss mask of every training row by one token."""
    from astuner.algorithms.training_rows import TrainingRow

    build = TrainingRow.from_sample

    def shifted(sample: Sample, episode: int, index: int = 0) -> TrainingRow:
        row = build(sample, episode, index)
        counts = list(row.train_counts)
        return replace(row, train_counts=[0, counts[0], *counts[1:-1]][: len(counts)])

    TrainingRow.from_sample = staticmethod(shifted)  # type: ignore[method-assign, assignment]


def _change_samples(change: Callable[[Sample], Sample]) -> None:
    from astuner.task_runner import groups

    build = groups.build_samples

    def changed(*arguments: Any, **settings: Any) -> list[Sample]:
        return [change(sample) for sample in build(*arguments, **settings)]

    groups.build_samples = changed  # type: ignore[assignment, attr-defined]


def results_of_tools_trained() -> None:
    """Train all tokens after the first prompt, including the results of tools."""

    def change(sample: Sample) -> Sample:
        first = min(span.start for span in sample.spans)
        return replace(sample, train_counts=(*sample.train_counts[:first], *[1] * (len(sample.token_ids) - first)))

    _change_samples(change)


def end_tokens_not_trained() -> None:
    """Mask the end token of every answer, as trainers do that mask padding where it is the same token."""

    def change(sample: Sample) -> Sample:
        ends = {span.end - 1 for span in sample.spans}
        counts = (0 if index in ends else count for index, count in enumerate(sample.train_counts))
        return replace(sample, train_counts=tuple(counts))

    _change_samples(change)


def advantages_of_batch_before() -> None:
    """Train each batch with the advantages of the one before."""
    from astuner.backbone.local import update

    compute = update.step_advantages
    earlier: list[Any] = []

    def delayed(*arguments: Any) -> Any:
        result = compute(*arguments)
        earlier.append(result.advantages)
        if len(earlier) > 1 and len(earlier[-2]) == len(result.advantages):
            return replace(result, advantages=earlier[-2])
        return result

    update.step_advantages = delayed  # type: ignore[assignment]


def stale_weights() -> None:
    """Leave the weights in the engine as they are, but count versions."""
    from astuner.llm_engine.embedded.engine import EmbeddedEngine

    send = EmbeddedEngine.update_weights

    def once(self: Any, state_dict: Any, policy_version: int) -> None:
        if policy_version == 0:
            self.first_weights = {name: tensor.clone() for name, tensor in state_dict.items()}
        send(self, self.first_weights, policy_version)

    EmbeddedEngine.update_weights = once  # type: ignore[method-assign]


def weights_not_sent() -> None:
    """Send the first weights only."""
    from astuner.llm_engine.embedded.engine import EmbeddedEngine

    send = EmbeddedEngine.update_weights

    def first(self: Any, state_dict: Any, policy_version: int) -> None:
        if policy_version == 0:
            send(self, state_dict, policy_version)

    EmbeddedEngine.update_weights = first  # type: ignore[method-assign]


def schedule_gives_zero() -> None:
    """Give the optimizer the learning rate 0 in all steps."""
    from astuner.backbone.local.policy import Optimizer

    Optimizer.lr = lambda self, step: 0.0  # type: ignore[method-assign]


def prefix_cache_kept() -> None:
    """Keep the key-value cache of earlier weights."""
    from astuner.llm_engine.embedded.scheduler import Scheduler

    Scheduler.clear_cache = lambda self: None  # type: ignore[method-assign]


def adapters_not_sent() -> None:
    """Send the base model's weights to the engine, without the adapters."""
    from astuner.backbone.local import policy

    def base_only(model: Any) -> dict[str, Any]:
        state = model.get_base_model().state_dict()
        return {name.replace(".base_layer", ""): tensor for name, tensor in state.items() if "lora_" not in name}

    policy.merged_weights = base_only  # type: ignore[assignment]


def adapters_not_attached() -> None:
    """Create adapters that no layer uses."""
    from astuner.backbone.local import policy

    attach = policy.with_lora

    def disabled(*arguments: Any) -> Any:
        model = attach(*arguments)
        model.disable_adapter_layers()
        return model

    policy.with_lora = disabled  # type: ignore[assignment]


def _wrap_generate(wrap: Callable[[Any, Any, Sequence[int], SamplingParams], Any]) -> None:
    from astuner.llm_engine.embedded.engine import EmbeddedEngine

    generate = EmbeddedEngine.generate

    async def wrapped(self: Any, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        completion: Completion = await wrap(self, generate, prompt_ids, params)
        return completion

    EmbeddedEngine.generate = wrapped  # type: ignore[method-assign]


def other_temperature() -> None:
    """Sample, and compute logprobs, at temperature 1, whatever the request says."""

    async def wrap(engine: Any, generate: Any, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        completion: Completion = await generate(engine, prompt_ids, replace(params, temperature=1.0))
        return completion

    _wrap_generate(wrap)


def cache_of_answers() -> None:
    """Cache answers by the length of the prompt only, which many tasks share."""
    cached: dict[tuple[int, int], Completion] = {}

    async def wrap(engine: Any, generate: Any, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        key = (len(prompt_ids), (params.seed or 0) % 4)
        if key not in cached:
            cached.setdefault(key, await generate(engine, prompt_ids, params))
        return replace(cached[key], policy_version=engine.policy_version)

    _wrap_generate(wrap)


def equal_seeds() -> None:
    """Give all episodes the same seed."""
    from astuner.task_rollout import rollout

    rollout.episode_seed = lambda *identity: 42  # type: ignore[assignment]


def same_batch() -> None:
    """Never advance the data."""
    from astuner.backbone.training.schedule import TaskOrder

    batch = TaskOrder.batch
    TaskOrder.batch = lambda self, step: batch(self, 1)  # type: ignore[method-assign]


def no_gradient() -> None:
    """Lose the gradient before the optimizer step."""
    from astuner.backbone.local.policy import Optimizer

    step = Optimizer.step

    def without(self: Any, number: int) -> float:
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.zero_()
        return step(self, number)

    Optimizer.step = without  # type: ignore[method-assign]


def optimizer_without_effect() -> None:
    """Skip every step of AdamW, as a gradient scaler does after an overflow."""
    torch.optim.AdamW.step = lambda self, closure=None: None  # type: ignore[method-assign, assignment]


def permuted_ids(size: int) -> list[int]:
    """Return another order of the token ids, as another model's tokenizer of the same size has."""
    half = size // 2
    return list(chain.from_iterable(zip(range(half, 2 * half), range(half), strict=True))) + list(range(2 * half, size))
