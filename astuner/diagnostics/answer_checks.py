"""Checks of the sampled answers: truncation, duplicates, tool calls, loss masks and policy versions."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from astuner.context_tracker.audit import describe_masks
from astuner.diagnostics.evidence import Result, StepEvidence, groups_of, tokens_digest
from astuner.errors import short_repr, shorten
from astuner.schema import Floats, Ints, LlmCall
from astuner.task_rollout.tool_use import text_of

# Log probability of a false alarm in one step.
_LOG_CHANCE = math.log(1e-9)
_LOG_CHANCE_OF_TRUNCATION = math.log(1e-4)
# Mean logprob of sampled tokens below which a model writes noise.
_LOWEST_LOGPROB = -2.5
# Resolution of logprobs in float32. Logprobs of nearly certain tokens are often equal, because they round to it.
_ROUNDING = 4e-6
_BITS = 40
_MIN_OFFERED = 8
_NAME = re.compile(r'"(?:name|function|tool|tool_name)"\s*:\s*"([^"]+)"')
_TAGGED_NAME = re.compile(r"<function=([\w.-]+)|<invoke name=\"([\w.-]+)\"|Action:\s*([\w.-]+)\s*\n\s*Action Input:")


def every_answer_truncated(step: StepEvidence) -> Result:
    """Find a run in which no answer ends with an end token."""
    calls = step.sampled_calls
    if step.stops or not _are_truncated_by_fault(step):
        return
    model, decode = step.start.model, step.start.decode
    stops = ", ".join(f"{token} {decode([token])!r}" for token in model.stop_ids[:4])
    ends = model.special_ids - set(model.stop_ids)
    ended = [token for call in calls for token in call.completion_ids if token in ends]
    if len(ended) >= len(calls) / 2:
        often = max(set(ended), key=ended.count)
        yield (
            f"the end token is wrong: all {len(calls)} answers were cut at their length limit and none sampled a stop "
            f"token ({stops}), but they contain the special token {often} {decode([often])!r} {ended.count(often)} "
            "times",
            f"make {decode([often])!r} end an answer: eos_token in tokenizer_config.json, and the end of turn in the "
            "chat template, must be the tokens that the model was trained with",
        )
        return
    yield (
        f"all {len(calls)} answers were truncated at their length limit, {max(len(c.completion_ids) for c in calls)} "
        f"tokens at most: none sampled an end token ({stops})",
        "raise rollout.max_response_length_in_one_turn (and data.max_response_length, rollout.max_model_len), or, if "
        "answers continue after their end, correct the end token: eos_token of the tokenizer and the chat template",
    )


def every_episode_left_out(step: StepEvidence) -> Result:
    """Find a step that trains nothing, because `mask_truncated_answers` leaves out all of its episodes."""
    if not step.start.config.trainer_common.algorithm.mask_truncated_answers or not step.scored:
        return
    for episode in step.scored:
        trained = {span.call_id for sample in episode.samples for span in sample.spans}
        if not any(call.finish_reason == "length" and call.call_id in trained for call in episode.calls):
            return
    yield (
        f"trainer_common.algorithm.mask_truncated_answers leaves out all {len(step.scored)} episodes, because each has "
        "an answer that reached its length limit, so the step trains nothing",
        "raise rollout.max_response_length_in_one_turn (and data.max_response_length, rollout.max_model_len), or write "
        "mask_truncated_answers: false",
    )


def _are_truncated_by_fault(step: StepEvidence) -> bool:
    """Return whether it is improbable, given the model and the earlier steps, that all answers of a step are cut."""
    count = len(step.sampled_calls)
    if step.stops_before:
        # Half of the earlier steps' rate, because it changes while the model learns.
        rate = step.stops_before / step.calls_before / 2
        return count * math.log1p(-rate) < _LOG_CHANCE_OF_TRUNCATION
    total = sum(float(np.sum(call.logprobs)) for call in step.sampled_calls)
    tokens = sum(len(call.logprobs) for call in step.sampled_calls)
    # An untrained model samples the end token only by chance, in one of some hundred answers.
    knows_language = tokens > 0 and total / tokens > _LOWEST_LOGPROB
    return count >= 8 if knows_language else count + step.calls_before >= 1000


def identical_samples(step: StepEvidence) -> Result:
    """Find episodes of a group that sampled the same answer although it is improbable."""
    compared: list[list[LlmCall]] = []
    # Short prompts first: they are often equal, so that the others need not be read.
    by_length = groups_of(step.sampled_calls, lambda call: len(call.prompt_ids))
    for similar in sorted(by_length, key=lambda calls: len(calls[0].prompt_ids)):
        groups = groups_of(similar, lambda call: tokens_digest(call.prompt_ids))
        compared += [calls for calls in groups if len({call.episode_id for call in calls}) > 1]
        if any(len({call.completion_ids for call in calls}) > 1 for calls in compared):
            return
    if not compared:
        return
    count = sum(len(calls) for calls in compared)
    equal_seeds = all(len({call.sampling.seed for call in calls}) == 1 for calls in compared)
    # If the samples are independent, each one equals the first sample with that sample's probability.
    log_chance = sum((len(calls) - 1) * sum(calls[0].logprobs) for calls in compared)
    why = f"which has a probability of 1e{log_chance / math.log(10):.0f} if they are sampled independently"
    if equal_seeds and compared[0][0].sampling.seed is not None:
        why = f"because they have the same seed ({compared[0][0].sampling.seed})"
    elif log_chance > _LOG_CHANCE:
        return
    yield (
        f"all {count} answers to the same prompts are equal, token for token, {why}: there is nothing to compare",
        "give each episode its own seed, set rollout.temperature to 0.7 to 1.0, and turn off caches of answers in the "
        "engine or in a proxy before it",
    )


def answers_of_other_prompts(step: StepEvidence) -> Result:
    """Find answers that were sampled for another prompt."""
    answers: dict[tuple[Ints, Floats], list[LlmCall]] = defaultdict(list)
    for call in step.sampled_calls:
        logprobs = np.asarray(call.logprobs, float)
        # The random bits in the logprobs' rounding. Different prompts rarely agree in these bits.
        if np.log2(-logprobs[logprobs < -_ROUNDING] / _ROUNDING).sum() >= _BITS:
            answers[(call.completion_ids, call.logprobs)].append(call)
    copied = [calls for calls in answers.values() if len(calls) > 1 and len({call.prompt_ids for call in calls}) > 1]
    if copied:
        first, second = copied[0][0], next(c for c in copied[0] if c.prompt_ids != copied[0][0].prompt_ids)
        yield (
            f"{sum(map(len, copied))} answers have the same tokens and the same logprobs, to the last bit, for "
            f"different prompts, for example {shorten(first.call_id)} and {shorten(second.call_id)}: a "
            "cache returns the answer to another prompt",
            "turn off the cache of answers in the engine, or in a proxy before it, or include the whole prompt and the "
            "sampling parameters in its key",
        )


def tool_calls_not_parsed(step: StepEvidence) -> Result:
    """Find well-formed tool calls in answers from which no tool call is parsed."""
    offered = [call for call in step.sampled_calls if call.tools_hash and call.messages]
    if any(call.messages[-1].get("tool_calls") for call in offered):
        return
    prompts: dict[str, str] = {}
    written: list[tuple[LlmCall, str]] = []
    for call in offered:
        name = _written_call(text_of(call.messages[-1]))
        if name is None:
            continue
        # The prompt contains the names of the offered tools. One prompt is decoded for each set of tools.
        if call.tools_hash not in prompts:
            prompts[call.tools_hash] = step.start.decode(call.prompt_ids)
        if name in prompts[call.tools_hash]:
            written.append((call, name))
    if len(written) >= 4 and len({call.episode_id for call, _ in written}) >= 2:
        yield (
            f"{len(written)} of {len(offered)} answers contain a well-formed call of a tool, for example of "
            f"{short_repr(written[0][1])} in {shorten(written[0][0].call_id)}, but no tool call was parsed from "
            "any answer: the parser does not know the format in which the model calls tools",
            "set model.renderer to the family of the model, or to {name: default, tool_parser: NAME} with the parser "
            "of its format; the chat template must describe the same format",
        )


def tools_never_called(step: StepEvidence) -> Result:
    """Find tools that the model has never called, although it has read of them in several episodes."""
    offered, called = step.tools
    template = step.start.template
    if called or offered < _MIN_OFFERED or not template.reads_tool_calls or template.shows_tools is False:
        return
    if any(tool_calls_not_parsed(step)):
        return
    yield (
        f"tools were offered in {offered} episodes, and the model called none of them",
        "say in the system prompt when to call a tool, and show a call; tune the model on transcripts with calls first "
        "(trainer_common.algorithm.adv_estimator: sft), or choose a model that calls tools; remove a tool that the "
        "tasks do not need",
    )


def _written_call(text: str) -> str | None:
    """Return the name of the tool in a well-formed tool call within a text; None if there is none."""
    tagged = _TAGGED_NAME.search(text)
    if tagged:
        return next(name for name in tagged.groups() if name)
    for match in _NAME.finditer(text):
        start = text.rfind("{", 0, match.start())
        try:
            value, _ = json.JSONDecoder().raw_decode(text[start:]) if start >= 0 else (None, 0)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and any(
            isinstance(value.get(key), dict) for key in ("arguments", "parameters", "args")
        ):
            return match.group(1)
    return None


def mask_differs_from_calls(step: StepEvidence) -> Result:
    """Find samples whose mask does not cover exactly the tokens that the model sampled."""
    wrong: dict[str, str] = {}
    for episode in step.episodes:
        is_whole = episode.status == "ok" and not episode.dropped_samples and bool(episode.samples)
        if episode.error_kind == "inexact":
            wrong[episode.episode_id] = str(episode.error)
        elif text := describe_masks(episode.calls, episode.samples, is_whole=is_whole):
            wrong[episode.episode_id] = text
    if wrong:
        example, text = next(iter(wrong.items()))
        yield (
            f"the samples of {len(wrong)} episodes are wrong, for example {shorten(example)}: {text}",
            "this is a bug in the building of samples: remove extensions that change samples, and report the bug with "
            "the episode's file; if only ends of turns are missed, the mask treats the end token as padding",
        )


def old_weights(step: StepEvidence) -> Result:
    """Find answers whose weights are older than the run allows."""
    config = step.start.config
    allowed = config.asynchrony.max_staleness if config.backbone == "trinity" else 0
    if not step.start.trains:
        return
    old: Mapping[str, int] = {
        call.call_id: call.policy_version
        for call in step.sampled_calls
        if call.policy_version < step.step - 1 - allowed
    }
    if old:
        yield (
            f"{len(old)} of {len(step.sampled_calls)} answers were sampled with stale weights, those after step "
            f"{min(old.values())}, while step {step.step} trains the weights after step {step.step - 1}: the engine "
            "does not receive the updated weights",
            "check the transfer of weights to the engine (sync); restart the engine, and do not share its server with "
            "another run",
        )
