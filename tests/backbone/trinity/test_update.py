"""What Trinity's trainer is given is what the local backbone trains on, token by token and gradient by gradient."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from astuner.backbone.algorithms import resolve
from astuner.config.root import RunConfig
from astuner.schema import Episode
from tests.backbone.verl.clusters import TOTAL_STEPS, made_episodes, small_run
from tests.backbone.verl.local_side import Weights, local

pytestmark = pytest.mark.trinity

UPDATES = 2


def experiences_of(episodes: list[Episode]) -> list[Any]:
    """As Trinity has them after they went from a runner to the operators of its pipeline."""
    from trinity.common.experience import Experience

    from astuner.backbone.trinity.experiences import experiences

    made = [one for place, episode in enumerate(episodes) for one in experiences(episode, 1, place // 3)]
    for one in made:  # a runner does
        one.info |= {"model_version": 0, "use_count": 0}
    return Experience.deserialize_many(Experience.serialize_many(made))


def mini_batches_of(config: RunConfig, episodes: list[Episode]) -> list[list[Any]]:
    """As Trinity's trainer gets them from its buffer."""
    from trinity.common.experience import Experience

    from astuner.backbone.trinity.credit import COUNT, _credited, _mini_batch, idle
    from astuner.backbone.trinity.experiences import EPISODE, SAMPLE

    run = config.astuner
    algorithm = resolve(run.trainer_common.algorithm)
    made = experiences_of(episodes)
    known = {(one.info[EPISODE], one.info[SAMPLE]): one for one in made}
    _, parts = _credited(run, UPDATES, 1, episodes)
    batches = [
        _mini_batch(run, algorithm, part, episodes, known) or [idle(1, made[0], reference=True)] for part in parts
    ]
    assert all(one.info[COUNT] == len(batch) for batch in batches for one in batch)
    return [Experience.deserialize_many(Experience.serialize_many(batch)) for batch in batches]


def trinitys_step(config: RunConfig, model: Path, batches: list[list[Any]]) -> Weights:
    """Move a model as Trinity's Tinker trainer does: its code makes tensors and loss, the service only gradients."""
    from trinity.algorithm.entropy_loss_fn.entropy_loss_fn import DummyEntropyLossFn
    from trinity.algorithm.kl_fn import KL_FN
    from trinity.trainer.tinker.tinker_trainer import TinkerTrainerWrapper
    from trinity.trainer.tinker.utils import to_tinker_input

    from astuner.backbone.local.optimiser import Optimiser
    from astuner.backbone.trinity.loss import EpisodeLoss

    run, policy = config.astuner, local(model).policy
    common = run.trainer_common
    optimiser = Optimiser(policy.trainable(), common.optim, TOTAL_STEPS)
    algorithm = common.algorithm.model_dump(mode="json")
    loss = EpisodeLoss("tinker", algorithm, common.kl_loss_coef, common.kl_loss_type)
    reference = local(model)
    for batch in batches:
        _, _, inputs = to_tinker_input(batch, None)
        for one, values in zip(batch, inputs, strict=True):
            size = len(values["action_mask"])
            values["ref_logprob"] = torch.tensor(reference.logprobs(one.tokens.tolist())[-size:])
        trainer = SimpleNamespace(
            model_inputs_list=inputs,
            policy_loss_fn=loss,
            entropy_loss_fn=DummyEntropyLossFn(0.0),
            kl_loss_fn=KL_FN.get("none")(),
            loss_agg_mode="seq-mean-token-sum",
            do_fix_actor_microbatch_loss_scale=False,
        )
        logprobs = []
        for one in batch:
            ids = one.tokens.long()[None]
            logits = policy.model(input_ids=ids).logits[0, :-1].log_softmax(-1)
            logprobs.append(logits.gather(-1, ids[0, 1:, None])[:, 0])
        TinkerTrainerWrapper._loss_func(trainer, [], logprobs)[0].backward()
        optimiser.step(1)
    return policy.model.state_dict()


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "dapo", "rloo", "reinforce++", "gspo", "cispo"])
def test_a_step_moves_the_weights_as_the_local_backbone_does(model_folder: Path, algorithm: str):
    config = small_run(algorithm)
    episodes = made_episodes(local(model_folder).logprobs)
    before = local(model_folder).policy.model.state_dict()
    _, wanted = local(model_folder).step(config, episodes)
    found = trinitys_step(config, model_folder, mini_batches_of(config, episodes))
    assert any(not torch.equal(before[name], value) for name, value in wanted.items())
    for name, value in wanted.items():
        assert torch.allclose(found[name], value, atol=1e-6, rtol=1e-4), name


def test_experiences_carry_the_trackers_tokens_and_masks_byte_for_byte(model_folder: Path):
    from astuner.backbone.trinity.certificate import digest, refuse_other
    from astuner.backbone.trinity.experiences import EPISODE, SAMPLE

    episodes = made_episodes(local(model_folder).logprobs)
    samples = {(one.episode_id, number): sample for one in episodes for number, sample in enumerate(one.samples)}
    trained = [one for batch in mini_batches_of(small_run("reinforce++"), episodes) for one in batch]
    assert len(samples) > len(episodes)
    assert len(trained) == len(samples)
    digests = {}
    for one in trained:
        sample = samples[one.info[EPISODE], one.info[SAMPLE]]
        start = one.prompt_length
        assert tuple(one.tokens.tolist()) == sample.token_ids
        assert [int(flag) for flag in one.action_mask.tolist()] == [min(count, 1) for count in sample.loss_mask[start:]]
        assert not any(sample.loss_mask[:start])
        assert one.logprobs.tolist() == pytest.approx(sample.logprobs[start:], abs=1e-6)
        name = (one.info[EPISODE], one.info[SAMPLE])
        digests[name] = digest(one.tokens.tolist(), one.action_mask.tolist(), one.logprobs.tolist())
    refuse_other(episodes, samples.keys(), digests, 1)


def test_an_episodes_weight_does_not_depend_on_its_timelines(model_folder: Path):
    from astuner.backbone.trinity.experiences import EPISODE

    episodes = made_episodes(local(model_folder).logprobs)
    by_episode = {"trainer_common__algorithm__loss_agg_mode": "seq-mean-token-mean"}
    assert len({len(episode.samples) for episode in episodes}) > 1
    for batch in mini_batches_of(small_run("reinforce++", **by_episode), episodes):
        weights: dict[str, float] = {}
        for one in batch:
            share = one.info["scale"][0] * sum(one.info["counts"]) / len(batch)
            weights[one.info[EPISODE]] = weights.get(one.info[EPISODE], 0.0) + share
        assert list(weights.values()) == pytest.approx([1 / len(weights)] * len(weights))
