"""Starts verl's workers and engines for tests of their internals."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from astuner.algorithms.registry import resolve
from astuner.config.loading import with_values
from astuner.config.root import RunConfig
from astuner.context_tracker.merge import build_samples
from astuner.schema import AgentStep, Episode, LlmCall, Task
from tests.backbone.verl.plans import CPU, run_config

TOTAL_STEPS = 4


def small_run(algorithm: str = "grpo", **values: Any) -> RunConfig:
    """Return a configuration whose update uses every feature: mini-batches, a KL loss, clipping."""
    return run_config(
        **{
            "rollout__temperature": 1.0,
            "rollout__max_model_len": 256,
            "trainer_common__algorithm__adv_estimator": algorithm,
            "trainer_common__use_kl_loss": True,
            "trainer_common__kl_loss_coef": 0.1,
            "trainer_common__mini_batch_num": 2,
            "trainer_common__max_tokens_per_micro_batch": 256,
            "trainer_common__optim__lr": 1e-3,
            "trainer_common__optim__lr_warmup_steps": 2,
            **values,
        }
    )


@dataclass
class VerlCluster:
    """Started workers and engines."""

    config: RunConfig
    trainer: Any
    engine: Any

    def update(self) -> Any:
        """Return a `VerlUpdate` on the workers."""
        from astuner.backbone.verl.update import VerlUpdate

        run = self.config.astuner
        algorithm = resolve(run.trainer_common.algorithm)
        return VerlUpdate(run, algorithm, self.trainer, torch.float32, TOTAL_STEPS, pad_token=0)


@contextlib.contextmanager
def started_ray(workers: int) -> Iterator[None]:
    """Start a Ray for at most `workers` data-parallel workers and the same number of engines."""
    from astuner.backbone.verl.cluster import ray_running, verl_environment, verl_worker_server
    from astuner.backbone.verl.trainer_config import compose_verl_config

    composed = compose_verl_config(run_config(trainer_common__n_gpus_per_node=workers), CPU)
    with (
        verl_environment("cpu", own_ray=True) as environment,
        verl_worker_server(environment) as server,
        ray_running(composed, environment, server),
    ):
        yield


@contextlib.contextmanager
def started_cluster(config: RunConfig, model: Path, workers: int, folder: Path) -> Iterator[VerlCluster]:
    """Start `workers` data-parallel workers and the same number of engines on the started Ray."""
    import ray
    from ray import PlacementGroupID
    from ray.util.placement_group import PlacementGroup

    from astuner.backbone.verl.rollout_engine import VerlEngine
    from astuner.backbone.verl.trainer import started_trainer
    from astuner.backbone.verl.trainer_config import compose_verl_config

    config = with_values(config, {"astuner.trainer_common.n_gpus_per_node": workers})
    plan = replace(CPU, model_path=str(model), checkpoint_folder=folder, total_steps=TOTAL_STEPS)
    try:
        with started_trainer(compose_verl_config(config, plan), config.astuner, torch.float32) as trainer:
            yield VerlCluster(config, trainer, VerlEngine(trainer.get_llm_client(), 256))
    finally:
        # A run leaves that to the end of its process.
        for actor in ray.util.list_named_actors(all_namespaces=True):
            ray.kill(ray.get_actor(**actor))
        for identity, group in ray.util.placement_group_table().items():
            if group["state"] != "REMOVED":
                ray.util.remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(identity))))


def make_episodes(logprobs: Any, seed: int = 5) -> list[Episode]:
    """Return three groups of three episodes of different lengths, with several rows each, some without a signal.

    Args:
        logprobs: function from token ids to the model's log-probability of each.
        seed: random seed.
    """
    rng = random.Random(seed)
    episodes = []
    for number in range(9):
        task = number // 3
        prompt = [rng.randrange(3, 60) for _ in range(6)]
        calls: list[LlmCall] = []
        for turn in range(1 + number % 3):
            completion = [rng.randrange(3, 60) for _ in range(rng.randrange(2, 8))]
            exact = logprobs([*prompt, *completion])[len(prompt) :]
            noisy = tuple(value + rng.uniform(-0.005, 0.005) for value in exact)
            step = AgentStep(f"room {turn}", float(number % 3 + turn))
            tokens = tuple(prompt), tuple(completion)
            calls.append(LlmCall(f"{number}/{turn}", f"e{number}", *tokens, noisy, "stop", step=step))
            # Every second turn extends the context; the others start a new row.
            extended = [*prompt, *completion, *[rng.randrange(3, 60) for _ in range(2)]]
            prompt = extended if turn % 2 == 0 else [rng.randrange(3, 60) for _ in range(9)]
        reward = 1.0 if task == 2 else float(number % 3 == 0)
        episodes.append(
            Episode(
                f"e{number}", Task(f"t{task}", "?"), number % 3, "ok", reward, True, tuple(calls),
                samples=tuple(build_samples(calls)),
            )
        )  # fmt: skip
    return episodes
