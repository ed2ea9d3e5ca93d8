"""The training samples of an episode, and the check that they are exact."""

from __future__ import annotations

from dataclasses import replace

from astuner.context_tracker import MergeMode, build_samples, certificate, limit_samples
from astuner.schema import Episode


def with_samples(episode: Episode, *, max_samples: int, merge: MergeMode, seed: int) -> Episode:
    """Return a scored episode with its samples.

    It is dropped if it has no tokens to train on. It fails if the samples do not rebuild each of their calls exactly.

    Args:
        episode: the episode; one that is not `ok` is returned as it is.
        max_samples: the maximum number of samples.
        merge: how calls become samples.
        seed: decides which samples are kept.
    """
    if episode.status != "ok":
        return episode
    samples, dropped = limit_samples(build_samples(episode.calls), max_samples, seed)
    kept = {span.call_id for sample in samples for span in sample.spans}
    calls = [call for call in episode.calls if not dropped or call.call_id in kept]
    if merge != "leaf":
        # Use the calls of the same samples, so that the merge mode does not change what is trained.
        samples = build_samples([call for call in episode.calls if call.call_id in kept], merge)
    if (share := certificate(calls, samples)) < 1.0:
        error = f"the samples rebuild only {share:.0%} of the calls exactly, so they are not trained; report this fault"
        episode = replace(episode, reward=None, is_success=None, agent_rewards={}, judgement=None)
        return replace(episode, status="failed", error_kind="inexact", error=error)
    if samples:
        return replace(episode, samples=tuple(samples), dropped_samples=dropped)
    error = "the workflow made no LLM call that returned a token, so there is nothing to train on"
    if episode.calls and not any(call.trained for call in episode.calls):
        targets = ", ".join(sorted({call.target_tag for call in episode.calls}))
        error = (
            "no LLM call of the episode has a target in rollout.trainable_targets, so there is nothing to train "
            f"on; the targets of its calls are: {targets}"
        )
    return replace(episode, status="dropped", error_kind="no_tokens", error=error)
