"""Checks of the episodes of a step, each with the fault and without."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from astuner.config.data import TaskReaderConfig
from astuner.diagnostics.monitor import checks_of
from astuner.model_tuner.codec import ChatCodec
from astuner.schema import Episode, Fork, LlmCall, SamplingParams
from tests.conftest import TOOLS
from tests.diagnostics.conftest import Evidence, found, make_task

WRITTEN = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def change_calls(episodes: list[Episode], **fields: Any) -> list[Episode]:
    return [replace(e, calls=tuple(replace(call, **fields) for call in e.calls)) for e in episodes]


def test_ordinary_episodes_have_no_finding(evidence: Evidence):
    step = evidence.step(evidence.ordinary())
    assert {check.name: list(check.find(step)) for check in checks_of("rollout")} == {
        check.name: [] for check in checks_of("rollout")
    }


def test_doubled_bos_in_prompts(evidence: Evidence):
    start = evidence.start()
    start = replace(start, model=replace(start.model, bos_id=0))
    doubled = [replace(e, calls=(replace(e.calls[0], prompt_ids=(0, 0, 5)),)) for e in evidence.ordinary()]
    assert "16 of 16 prompts" in found("doubled_bos_in_prompts", evidence.step(doubled, start=start))[0][0]
    once = [replace(e, calls=(replace(e.calls[0], prompt_ids=(0, 5)),)) for e in evidence.ordinary()]
    assert found("doubled_bos_in_prompts", evidence.step(once, start=start)) == []


def test_tools_that_the_template_does_not_render(evidence: Evidence):
    start = evidence.start()
    without = replace(start, template=replace(start.template, shows_tools=False))
    episodes = change_calls(evidence.ordinary(), tools_hash="tools")
    assert found("tools_not_in_prompt", evidence.step(episodes, start=without))
    assert found("tools_not_in_prompt", evidence.step(episodes)) == []
    assert found("tools_not_in_prompt", evidence.step(evidence.ordinary(), start=without)) == []


def test_tools_without_a_parser_of_their_calls(evidence: Evidence):
    tokenizer = copy.deepcopy(evidence.codec.tokenizer)
    tokenizer.chat_template = tokenizer.chat_template.replace("tool_call>", "call>")
    episodes = change_calls(evidence.ordinary(), tools_hash="tools")
    start = evidence.start(ChatCodec(tokenizer, "default"))
    ((message, fix),) = found("tools_without_parser", evidence.step(episodes, start=start))
    assert "16 calls offer tools" in message
    assert "no known format" in message
    assert "{name: default, tool_parser: NAME} with one of gpt-oss, glm, " in fix
    assert found("tools_without_parser", evidence.step(evidence.ordinary(), start=start)) == []
    named = evidence.start(ChatCodec(tokenizer, {"name": "default", "tool_parser": "hermes"}))
    assert found("tools_without_parser", evidence.step(episodes, start=named)) == []


def test_a_system_message_that_is_not_in_the_prompt(evidence: Evidence):
    episodes = []
    for number in range(3):
        task = make_task(number)
        call = evidence.call("e", [user(task.main_query)], "1")
        hidden = ({"role": "system", "content": "Be kind."}, *call.messages)
        episodes.append(evidence.episode(task, 0, 1.0, calls=(replace(call, messages=hidden),)))
    ((message, fix),) = found("message_not_in_prompt", evidence.step(episodes))
    assert "system message" in message
    assert "chat_template" in fix


def test_one_prompt_for_all_tasks(evidence: Evidence):
    call = evidence.call("e", [user("Solve it.")], "1")
    episodes = [evidence.episode(make_task(n), 0, 1.0, calls=(call,)) for n in range(4)]
    assert "4 different questions" in found("same_prompt_for_all_tasks", evidence.step(episodes))[0][0]
    one_task = [evidence.episode(make_task(0), repeat, 1.0, calls=(call,)) for repeat in range(4)]
    assert found("same_prompt_for_all_tasks", evidence.step(one_task)) == []


@pytest.mark.parametrize("choices", [None, "as choices"])
def test_a_prompt_with_the_reference_answer(evidence: Evidence, choices: str | None):
    episodes = []
    for number in range(100, 106):
        given = {"choices": [str(number + 1), "7"]} if choices else {}
        task = make_task(number, **given)
        call = evidence.call(f"e{number}", [user(f"{task.main_query} {number + 1}")], "1")
        episodes.append(evidence.episode(task, 0, 1.0, calls=(call,)))
    assert bool(found("answer_in_prompt", evidence.step(episodes))) == (choices is None)


@pytest.mark.parametrize(
    ("cause", "check"),
    [("retokenised_by_client", "retokenised_by_client"), ("system_changed", "system_prompt_changed")],
)
def test_forks_that_the_client_causes(evidence: Evidence, cause: Any, check: str):
    fork = Fork(cause, "e/0", 3, (1,), (2,), "a", "b", 1)
    ordinary = [replace(e, calls=e.calls * 2) for e in evidence.ordinary()]
    forked = [replace(e, calls=(e.calls[0], replace(e.calls[0], fork=fork))) for e in ordinary]
    assert "16 of 16 conversations" in found(check, evidence.step(forked))[0][0]
    assert found(check, evidence.step([*ordinary[:14], *forked[:2]])) == []
    history_forks = [
        replace(e, calls=(e.calls[0], replace(e.calls[0], fork=replace(fork, cause="truncated")))) for e in ordinary
    ]
    assert found(check, evidence.step(history_forks)) == []


def walk(evidence: Evidence, number: int, observations: list[str]) -> Episode:
    messages: list[dict[str, Any]] = [user(f"Walk {number}.")]
    for place, observation in enumerate(observations):
        messages += [{"role": "assistant", "content": f"step {place}"}, user(observation)]
    call = evidence.call(f"e{number}", messages, "done")
    return evidence.episode(make_task(number), 0, 1.0, calls=(call,))


def test_observations_that_never_change(evidence: Evidence):
    frozen = [walk(evidence, n, [f"You are at {n}."] * 3) for n in range(4)]
    assert "does not advance" in found("observations_never_change", evidence.step(frozen))[0][0]
    moving = [walk(evidence, n, [f"You are at {n + place}." for place in range(3)]) for n in range(4)]
    encouraged = [walk(evidence, n, ["Try again."] * 3) for n in range(4)]
    for episodes in (moving, encouraged, [*frozen[:3], moving[3]]):
        assert found("observations_never_change", evidence.step(episodes)) == []


def tool_episode(evidence: Evidence, number: int, result: str) -> Episode:
    function = {"name": "search", "arguments": f'{{"q": {number}}}'}
    messages = [
        user(f"Find {number}."),
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]},
        {"role": "tool", "content": result, "tool_call_id": "1", "name": "search"},
    ]
    return evidence.episode(make_task(number), 0, 0.0, calls=(evidence.call(f"e{number}", messages, "none"),))


def test_a_tool_that_always_fails(evidence: Evidence):
    broken = [tool_episode(evidence, n, f"ConnectionError: no route to host (attempt {n})") for n in range(4)]
    ((message, _),) = found("tool_always_fails", evidence.step(broken))
    assert "'search' failed with the same error: ConnectionError" in message
    mistakes = [tool_episode(evidence, n, f"Error: missing required argument 'q{n}'") for n in range(4)]
    works = tool_episode(evidence, 5, "3 results")
    for episodes in (mistakes, [*broken[:3], works], broken[:3]):
        assert found("tool_always_fails", evidence.step(episodes)) == []


def test_the_tasks_of_the_step_before(evidence: Evidence):
    episodes = evidence.ordinary()[::4][:3]
    again = frozenset(episode.task.task_id for episode in episodes)
    assert found("same_tasks_again", evidence.step(episodes, previous_tasks=again))
    assert found("same_tasks_again", evidence.step(episodes, previous_tasks=again - {"t0"} | {"t9"})) == []
    assert found("same_tasks_again", evidence.step(episodes)) == []
    step = evidence.step(episodes, previous_tasks=again)
    for reader in ({"curriculum": {"enable": True}}, {"filters": [{"type": "difficulty"}]}):
        adaptive = step.start.config.model_copy(update={"task_reader": TaskReaderConfig.model_validate(reader)})
        assert found("same_tasks_again", replace(step, start=replace(step.start, config=adaptive))) == []


def test_truncation_of_every_answer(evidence: Evidence):
    cut = change_calls(evidence.ordinary(), finish_reason="length")
    assert "all 16 answers were truncated" in found("every_answer_truncated", evidence.step(cut))[0][0]
    assert found("every_answer_truncated", evidence.step([*cut[:15], evidence.ordinary()[15]])) == []
    # In earlier steps, one answer in fifty ended: sixteen that do not are no surprise. Nor are those of a random model.
    assert found("every_answer_truncated", evidence.step(cut, calls_before=100, stops_before=2)) == []
    assert found("every_answer_truncated", evidence.step(cut, calls_before=100, stops_before=99))
    noise = [replace(e, calls=(replace(e.calls[0], logprobs=tuple(-6.0 for _ in e.calls[0].logprobs)),)) for e in cut]
    assert found("every_answer_truncated", evidence.step(noise)) == []


def test_a_step_whose_episodes_are_all_left_out(evidence: Evidence):
    start = evidence.start(config={"trainer_common": {"algorithm": {"mask_truncated_answers": True}}})
    cut = change_calls(evidence.ordinary(), finish_reason="length")
    assert "leaves out all 16 episodes" in found("every_episode_left_out", evidence.step(cut, start=start))[0][0]
    assert found("every_episode_left_out", evidence.step([*cut[:15], evidence.ordinary()[15]], start=start)) == []
    assert found("every_episode_left_out", evidence.step(cut)) == []


def test_an_end_token_that_does_not_end(evidence: Evidence):
    cut = [
        replace(e, calls=(replace(e.calls[0], finish_reason="length", completion_ids=(9, 0, 9), logprobs=(-0.1,) * 3),))
        for e in evidence.ordinary()
    ]
    ((message, fix),) = found("every_answer_truncated", evidence.step(cut))
    assert "the end token is wrong" in message
    assert "'<|endoftext|>'" in message + fix


def group(evidence: Evidence, logprob: float, **fields: Any) -> list[Episode]:
    """Two tasks whose episodes have the same answer."""
    return [
        evidence.episode(
            make_task(n),
            repeat,
            1.0,
            calls=(
                replace(
                    evidence.call(f"e{n}-{repeat}", [user(f"{n}?")], "the same", logprobs=lambda place: logprob),
                    **fields,
                ),
            ),
        )
        for n in range(2)
        for repeat in range(4)
    ]


def test_samples_that_are_equal_although_that_is_improbable(evidence: Evidence):
    ((message, _),) = found("identical_samples", evidence.step(group(evidence, -3.0)))
    assert "sampled independently" in message
    certain = group(evidence, -0.01)
    assert found("identical_samples", evidence.step(certain)) == []
    seeded = group(evidence, -0.01, sampling=SamplingParams(seed=5))
    assert "the same seed (5)" in found("identical_samples", evidence.step(seeded))[0][0]


def test_an_answer_to_another_prompt(evidence: Evidence):
    def calls(spread: float) -> list[Episode]:
        return [
            evidence.episode(
                make_task(n),
                0,
                1.0,
                calls=(
                    evidence.call(f"e{n}", [user(f"{n}?")], "an answer of ten", logprobs=lambda p: -spread * (p + 1)),
                ),
            )
            for n in range(3)
        ]

    assert "a cache returns" in found("answers_of_other_prompts", evidence.step(calls(0.1)))[0][0]
    assert found("answers_of_other_prompts", evidence.step(calls(1e-7))) == []
    assert found("answers_of_other_prompts", evidence.step(evidence.ordinary())) == []


def test_tool_calls_that_are_not_parsed(evidence: Evidence):
    def episodes(parsed: bool, text: str = WRITTEN) -> list[Episode]:
        result = []
        for number in range(4):
            call = evidence.call(f"e{number}", [user("1 + 2?")], text, tools=TOOLS)
            if not parsed:
                call = replace(call, messages=(*call.messages[:-1], {"role": "assistant", "content": text}))
            result.append(evidence.episode(make_task(number), 0, 0.0, calls=(call,)))
        return result

    ((message, fix),) = found("tool_calls_not_parsed", evidence.step(episodes(parsed=False)))
    assert "'add'" in message
    assert "model.renderer" in fix
    assert found("tool_calls_not_parsed", evidence.step(episodes(parsed=True))) == []
    assert found("tool_calls_not_parsed", evidence.step(episodes(False, '{"name": "add", "arguments": {'))) == []
    assert found("tool_calls_not_parsed", evidence.step(episodes(False, WRITTEN.replace("add", "subtract")))) == []


def test_tools_that_are_never_called(evidence: Evidence):
    def episodes(count: int, text: str = "It is 3.") -> list[Episode]:
        calls = [evidence.call(f"e{n}", [user("1 + 2?")], text, tools=TOOLS) for n in range(count)]
        return [evidence.episode(make_task(n), 0, 0.0, calls=(call,)) for n, call in enumerate(calls)]

    ((message, fix),) = found("tools_never_called", evidence.step(episodes(8)))
    assert "offered in 8 episodes" in message
    assert "system prompt" in fix
    assert "120 episodes" in found("tools_never_called", evidence.step(episodes(8), tools_before=(112, 0)))[0][0]
    assert found("tools_never_called", evidence.step(episodes(7))) == []
    assert found("tools_never_called", evidence.step(episodes(8), tools_before=(8, 1))) == []
    assert found("tools_never_called", evidence.step([*episodes(8), *episodes(1, WRITTEN)])) == []
    assert found("tools_never_called", evidence.step(evidence.ordinary())) == []


@pytest.mark.parametrize("fault", ["context", "missed", "shifted", "call lost"])
def test_a_mask_that_does_not_fit_the_calls(evidence: Evidence, fault: str):
    def change(episode: Episode) -> Episode:
        (sample,) = episode.samples
        span = sample.spans[0]
        counts = list(sample.train_counts)
        if fault == "context":
            counts[span.start - 1] = 1
        elif fault == "missed":
            counts[span.end - 1] = 0
        elif fault == "shifted":
            counts = [*counts[1:], 0]
        else:
            other: LlmCall = replace(episode.calls[0], call_id="other")
            return replace(episode, calls=(*episode.calls, other))
        return replace(episode, samples=(replace(sample, train_counts=tuple(counts)),))

    assert found("mask_differs_from_calls", evidence.step(list(map(change, evidence.ordinary()))))


def test_episodes_that_failed_because_their_mask_is_wrong(evidence: Evidence):
    first, *others = evidence.ordinary()
    failed = replace(first, status="failed", error_kind="inexact", error="the loss mask trains 3 tokens", samples=())
    ((message, _),) = found("mask_differs_from_calls", evidence.step([failed, *others]))
    assert f"samples of 1 episodes are wrong, for example {first.episode_id}: the loss mask trains 3" in message


def test_answers_of_old_weights(evidence: Evidence):
    episodes = change_calls(evidence.ordinary(), policy_version=3)
    assert "stale weights" in found("old_weights", evidence.step(episodes, step=5))[0][0]
    assert found("old_weights", evidence.step(episodes, step=4)) == []
    late = evidence.start(config={"backbone": "trinity", "asynchrony": {"max_staleness": 1}})
    assert found("old_weights", evidence.step(episodes, step=5, start=late)) == []
