"""Checks of an update: learning rate, gradient, weights, advantages and logprobs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from itertools import islice

from astuner.config.algorithms import ALGORITHMS
from astuner.diagnostics.evidence import Result, UpdateEvidence
from astuner.diagnostics.logprob_gap import TokenPairs, explain_logprob_gap, off_by_one
from astuner.errors import shorten
from astuner.run_record.updates import count_trained_tokens
from astuner.schema import Episode, Floats, Sample

# Limits of the logprobs' mean difference. Rounding causes about 1e-5 in float32 and some hundredths in bfloat16.
_LARGEST_GAP = {"float32": 1e-3, "bfloat16": 0.15}
# The samples of an asynchronous trainer come from weights that are some steps old.
_LARGEST_GAP_IF_UNKNOWN = 0.3
# A smaller difference is also reported if it exceeds this limit and `_GROWTH` times that of the earlier steps.
_LARGEST_USUAL_GAP = {"float32": 5e-5, "bfloat16": 0.015}
_GROWTH = 30.0
# A step with a smaller effective sample size, or with larger shares of masked or truncated tokens, is reported. In
# float32 the ratios are within 1e-5 of 1. In bfloat16, gaps of 0.06 nats give an effective sample size of 0.996.
_LEAST_EFFECTIVE_SAMPLE_SIZE = 0.7
_MOST_MASKED = 0.5
_MOST_TRUNCATED = 0.1
# Maximum number of samples that are compared with a shift, because the comparison is slow.
_COMPARED_SAMPLES = 64


def learning_rate_is_zero(update: UpdateEvidence) -> Result:
    """Find an update with the learning rate 0."""
    optim = update.rollout.start.config.trainer_common.optim
    # A schedule may end at 0. It never starts there.
    may_end = optim.lr_scheduler != "constant" and optim.min_lr_ratio == 0 and update.rollout.step > 1
    if update.metrics.get("lr") == 0 and not may_end:
        yield (
            "the learning rate of this step is 0, so the update changed nothing",
            "raise trainer_common.optim.lr or min_lr_ratio, and check lr_warmup_steps and lr_scheduler",
        )


def no_gradient(update: UpdateEvidence) -> Result:
    """Find an update with a zero gradient although episodes have advantages."""
    advantages = sum(value != 0 for value in update.advantages.values())
    if update.metrics.get("grad_norm") == 0 and advantages:
        yield (
            f"the gradient is 0, although {advantages} episodes have an advantage: the loss does not reach the trained "
            "weights, so nothing is learned",
            "check that weights are trainable (model.lora.target_modules names modules of this model; nothing freezes "
            "the parameters) and that the loss mask is not empty",
        )


def weights_unchanged(update: UpdateEvidence) -> Result:
    """Find an update that has a gradient but changes no weight."""
    metrics = update.metrics
    changed, norm, rate = metrics.get("update/changed_weights"), metrics.get("grad_norm", 0.0), metrics.get("lr", 0.0)
    if changed == 0 and norm > 0 and rate > 0:
        yield (
            f"no trained weight changed in this step, although the gradient's norm is {norm:.3g} and the learning rate "
            f"{rate:.3g}: the optimizer step has no effect",
            "check that the optimizer has the model's parameters and that model.lora is attached to modules that are "
            "used; raise trainer_common.optim.lr if it is below the rounding of the weights",
        )


def advantages_contradict_rewards(update: UpdateEvidence) -> Result:
    """Find advantages that contradict the rewards of their group."""
    config = update.rollout.start.config
    algorithm = config.trainer_common.algorithm
    reinforcement = ALGORITHMS[algorithm.adv_estimator].reinforcement
    # Shaped rewards, components that are normalised separately, and a teacher's part need not have the order of the
    # rewards. A mean weighted by lengths may be on the other side of a reward than the mean.
    has_teacher = config.trainer_common.distillation.teacher is not None
    shaped = algorithm.use_kl_in_reward or algorithm.overlong_buffer_length or has_teacher
    if reinforcement is None or shaped or reinforcement.advantage.by_component or reinforcement.advantage.by_length:
        return
    groups: dict[str, list[Episode]] = {}
    for episode in update.rollout.scored:
        # An asynchronous trainer may lose the samples of an episode, which is then not trained.
        if episode.episode_id in update.advantages and update.samples.get(episode.episode_id):
            groups.setdefault(episode.task.task_id if reinforcement.advantage.compares_group else "", []).append(
                episode
            )
    wrong, example = 0, ""
    for episodes in groups.values():
        for episode in episodes:
            if not _fits(episode, episodes, update):
                wrong += 1
                mean = statistics.fmean(other.reward or 0.0 for other in episodes)
                example = example or (
                    f"{shorten(episode.episode_id)} has the reward {episode.reward:g} in a group with the mean "
                    f"{mean:.3g}, and the advantage {update.advantages[episode.episode_id]:+.3g}"
                )
    if wrong:
        yield (
            f"the advantages of {wrong} of {sum(map(len, groups.values()))} episodes contradict their rewards: "
            f"{example}. The advantages belong to other episodes or to another batch",
            "this is a bug in the computation of advantages: remove extensions that reorder episodes or change "
            "advantages, and report the bug with this step's episodes",
        )


def _fits(episode: Episode, group: list[Episode], update: UpdateEvidence) -> bool:
    """Return whether an episode's advantage agrees with the rewards of its group.

    It has the sign and the order that the rewards imply, and the same value in the episode's samples.
    """
    advantage, reward = update.advantages[episode.episode_id], episode.reward or 0.0
    has_call_rewards = bool(episode.agent_rewards) or any(
        call.reward is not None or call.step is not None for call in episode.calls
    )
    if not has_call_rewards:
        trained = {value for sample in update.samples.get(episode.episode_id, ()) for _, value in sample.advantages}
        if any(abs(value - advantage) > 1e-4 * max(1.0, abs(advantage)) for value in trained):
            return False
    spread = max(abs(update.advantages[other.episode_id]) for other in group)
    tolerance = 1e-3 * max(spread, 1e-6)
    scale = max(abs(other.reward or 0.0) for other in group)
    for other in group:
        difference = reward - (other.reward or 0.0)
        order = advantage - update.advantages[other.episode_id]
        if abs(difference) <= 1e-6 * scale:
            if abs(order) > tolerance:
                return False
        elif order * difference < 0 and abs(order) > tolerance:
            return False
    mean = statistics.fmean(other.reward or 0.0 for other in group)
    return not (abs(advantage) > tolerance and (reward - mean) * advantage < -1e-6 * scale * spread)


def mask_off_by_one(update: UpdateEvidence) -> Result:
    """Find a trainer that trains different tokens than were sampled, usually the neighbouring ones."""
    sizes = [(count_trained_tokens(sample), len(logprobs)) for sample, logprobs in _trained_logprobs(update)]
    other = [(sampled, trained) for sampled, trained in sizes if sampled != trained]
    if (shifted := off_by_one(list(islice(token_pairs(update), _COMPARED_SAMPLES)))) is not None:
        yield shifted.text, shifted.fix
    elif other:
        yield (
            f"the trainer trained a different number of tokens than was sampled in {len(other)} of {len(sizes)} "
            f"samples, for example {other[0][1]} instead of {other[0][0]}: the loss mask of the trainer is "
            "off by one, or rows are cut",
            "this is a bug in the building of training rows: remove extensions that change masks or rows, and report "
            "the bug",
        )


def logprob_gap(update: UpdateEvidence) -> Result:
    """Find a difference between the logprobs of sampler and trainer that rounding does not explain."""
    difference = update.metrics.get("logprob_difference")
    if difference is None or not difference > 0:
        return
    limit = _LARGEST_GAP.get(update.dtype or "", _LARGEST_GAP_IF_UNKNOWN)
    usual = statistics.median_low(update.gaps) if update.gaps else math.inf
    largest_usual = _LARGEST_USUAL_GAP.get(update.dtype or "", _LARGEST_GAP_IF_UNKNOWN / 10)
    grew = update.dtype is not None and difference > max(_GROWTH * usual, largest_usual)
    if difference > limit or grew:
        cause = explain_logprob_gap(token_pairs(update), difference, earlier=update.gaps)
        yield cause.text, cause.fix


def sampler_mismatch(update: UpdateEvidence) -> Result:
    """Find a correction for the sampler's and the trainer's difference that discards much of the step."""
    metrics, config = update.metrics, update.rollout.start.config
    facts = _correction_problems(metrics, "")
    ages = sorted(int(name.rpartition("_")[2]) for name in metrics if name.startswith("correction/gap_mean/stale_"))
    stale = {age: problems for age in ages if age and (problems := _correction_problems(metrics, f"/stale_{age}"))}
    if stale and not facts:
        age = min(stale)
        facts = [f"of the tokens that are {age} {'step' if age == 1 else 'steps'} stale, {stale[age][0]}"]
    if not facts:
        return
    causes = ["set model.dtype: float32"] if update.dtype not in (None, "float32") else []
    if stale:
        causes.insert(0, f"set asynchrony.max_staleness: {min(stale) - 1}")
    elif config.backbone == "trinity" and config.asynchrony.max_staleness > 0 and not ages:
        causes.append("lower asynchrony.max_staleness")
    if config.rollout.is_cut and config.backbone != "trinity":
        causes.append("write rollout.top_p: 1.0 and top_k: -1")
    mode = config.trainer_common.correction.mode
    bounds = "raise its bounds (max_weight, max_rejection), or write correction: token_tis"
    if mode not in ("auto", "none", "token_tis"):
        causes.append(f"trainer_common.correction.mode is {mode}: {bounds}")
    gap = metrics.get("correction/gap_mean", 0.0)
    yield (
        f"the policy that samples is not the policy that is trained: {', and '.join(facts)} (the logprobs differ by "
        f"{gap:.2g} nats per token on average)",
        "; or ".join(causes) or "check that the engine serves the trained model at rollout.temperature",
    )


def _correction_problems(metrics: Mapping[str, float], suffix: str) -> list[str]:
    """Return what is bad about the correction of the tokens whose metrics have a suffix."""
    size, masked, truncated = (
        metrics.get(f"correction/{name}{suffix}", default)
        for name, default in (("effective_sample_size", 1.0), ("masked", 0.0), ("truncated", 0.0))
    )
    problems = []
    if size < _LEAST_EFFECTIVE_SAMPLE_SIZE:
        problems.append(f"the effective sample size of the importance ratios is {size:.0%} of the tokens")
    if masked > _MOST_MASKED:
        problems.append(f"the correction leaves out {masked:.0%} of the tokens")
    if truncated > _MOST_TRUNCATED:
        problems.append(f"{truncated:.0%} of the importance weights are truncated")
    return problems


def token_pairs(update: UpdateEvidence) -> Iterator[TokenPairs]:
    """Iterate over the sampler's and the trainer's logprobs for each sample's trained tokens."""
    for sample, logprobs in _trained_logprobs(update):
        yield sample.trained_logprobs, logprobs


def _trained_logprobs(update: UpdateEvidence) -> Iterator[tuple[Sample, Floats]]:
    """Iterate over the samples whose logprobs the trainer has computed, with these logprobs."""
    for episode in update.rollout.episodes:
        for sample, trained in zip(episode.samples, update.samples.get(episode.episode_id, ()), strict=False):
            if trained.logprobs is not None:
                yield sample, trained.logprobs
