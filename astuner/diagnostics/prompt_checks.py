"""Checks on the model's inputs: prompts, conversations, tools and observations."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import get_args

from astuner.diagnostics.evidence import REFERENCE_FIELDS, Result, StepEvidence, Transcript, reference
from astuner.diagnostics.start_checks import BOS_FIX
from astuner.errors import short_repr
from astuner.model_tuner.tool_parsers import TOOL_PARSER_NAMES
from astuner.schema import ForkCause, Ints, LlmCall, Task
from astuner.task_rollout.tool_use import FAILURE, text_of

# Maximum number of prompts that are decoded in a step, because decoding is slow.
_DECODED_PROMPTS = 8
# Errors that the arguments of the call may have caused. Another call may succeed.
_CALLERS_MISTAKE = re.compile(
    r"argument|parameter|not found|unknown|no such|invalid|json|syntax|valid|required|unexpected|schema|not defined|"
    r"NameError|TypeError|ValueError|KeyError|IndexError|ZeroDivision",
    re.IGNORECASE,
)
_FIXES: Mapping[str, str] = {
    "template_rewrote_history": (
        "the chat template renders earlier answers differently once another message follows (the templates of Qwen3 "
        "and DeepSeek-R1 drop earlier thinking); set model.renderer: {name: qwen3, thinking_retention: all}, with the "
        "name of your model's renderer, or default for a model without one"
    ),
    "framework_edited_history": (
        "the agent changed or cut an earlier message; make it send the earlier request and the unchanged answer, "
        "followed by new messages (the usual reason is an agent memory that compresses or trims)"
    ),
    "tools_changed": (
        "the conversation continued with different tools; register all tools before the first call and do not change "
        "them, or hide tools from the model with rollout.agentscope_disable_toolcalls: true"
    ),
    "system_changed": (
        "the first message of the conversation changed; keep the system message the same for the whole episode, and "
        "put changing content (time, notes, state) into a user message"
    ),
    "retokenised_by_client": (
        "an answer came back in a different form (trimmed, or with thinking or tool calls written into the text); make "
        "the agent append the answer's message unchanged: answer.call.messages[-1]"
    ),
    "truncated": (
        "messages were removed from the history, or an answer was cut inside its thinking or its tool calls; keep the "
        "whole history, or raise rollout.max_response_length_in_one_turn and rollout.max_model_len"
    ),
    "history_compressed": (
        "the agent loop replaced the history with a summary; raise context_tracker.max_env_len for fewer summaries, or "
        "set context_tracker.context_tracker_type: linear for none"
    ),
    "window_moved": (
        "the agent loop left out the oldest turns; raise context_tracker.sliding_window_cm.turns, or set "
        "context_tracker.context_tracker_type: linear to keep all turns"
    ),
    "thinking_dropped": (
        "the agent loop left out the thinking of earlier turns; raise context_tracker.linear_think_cm.keep_turns, or "
        "set context_tracker.context_tracker_type: linear to keep all thinking"
    ),
}


def doubled_bos_in_prompts(step: StepEvidence) -> Result:
    """Find prompts that start with two begin-of-sequence tokens."""
    bos = step.start.model.bos_id
    if bos is None or step.start.template.bos_count > 1:
        return
    doubled = sum(call.prompt_ids[:2] == (bos, bos) for call in step.sampled_calls)
    if doubled:
        yield (
            f"{doubled} of {len(step.sampled_calls)} prompts start with 2 begin-of-sequence tokens (doubled BOS), "
            "which the model has never seen",
            BOS_FIX,
        )


def tools_not_in_prompt(step: StepEvidence) -> Result:
    """Find tools that the chat template leaves out of the prompt."""
    with_tools = [call for call in step.sampled_calls if call.tools_hash]
    if with_tools and step.start.template.shows_tools is False:
        yield (
            f"{len(with_tools)} calls offer tools to the model, but the chat template does not render tools: the model "
            "never sees them",
            "use a chat template that renders `tools` (chat_template in tokenizer_config.json under model.path), set "
            "model.renderer to the family of the model, or describe the tools in the system prompt",
        )


def tools_without_parser(step: StepEvidence) -> Result:
    """Find tools that are offered although nothing parses the model's calls of them."""
    with_tools = [call for call in step.sampled_calls if call.tools_hash]
    if with_tools and not step.start.template.reads_tool_calls:
        yield (
            f"{len(with_tools)} calls offer tools to the model, but its chat template has no known format of tool "
            "calls: a tool call in an answer stays text, and the agent gets no tool call",
            "set model.renderer to the family of the model, or to {name: default, tool_parser: NAME} with one of "
            f"{', '.join(TOOL_PARSER_NAMES)}; with tool_parser: null, the agent reads the calls from the text",
        )


def message_not_in_prompt(step: StepEvidence) -> Result:
    """Find a role whose messages the chat template leaves out of the prompt."""
    by_task: dict[str, LlmCall] = {}
    for episode in step.episodes:
        calls = [call for call in episode.calls if call.trained and call.completion_ids]
        if calls:
            by_task.setdefault(episode.task.task_id, max(calls, key=lambda call: len(call.messages)))
    seen: dict[str, list[bool]] = defaultdict(list)
    for call in list(by_task.values())[:_DECODED_PROMPTS]:
        prompt = _squeezed(step.start.decode(call.prompt_ids))
        for message in call.messages[:-1]:
            role, text = str(message.get("role")), _squeezed(text_of(message))
            if role in ("system", "user", "tool") and text:
                seen[role].append(text in prompt)
    for role, found in seen.items():
        # The tokenizer may normalise characters in one message, but not in all messages of a role.
        if not any(found):
            yield (
                f"none of {len(found)} {role} messages is in the prompt that the model received: the chat template "
                f"leaves the {role} message out",
                f"use a chat template that renders the role {role} (chat_template in tokenizer_config.json under "
                "model.path), set model.renderer to the family of the model, or put the text into a user message",
            )


def _squeezed(text: str) -> str:
    return "".join(text.split())


def same_prompt_for_all_tasks(step: StepEvidence) -> Result:
    """Find a workflow that sends the same first prompt for all tasks."""
    prompts: dict[Ints, set[str]] = defaultdict(set)
    tasks: dict[str, Task] = {}
    for episode in step.episodes:
        if episode.calls and episode.calls[0].prompt_ids:
            prompts[episode.calls[0].prompt_ids].add(episode.task.task_id)
            tasks[episode.task.task_id] = episode.task
    questions = {(task.main_query, str(task.init_messages)) for task in tasks.values()}
    if len(questions) >= 3 and len(prompts) == 1:
        yield (
            f"the first prompt is the same in {len(tasks)} tasks with {len(questions)} different questions: the "
            "workflow does not show the task to the model",
            "put workflow_task.task.main_query (or init_messages) into the messages of the first call",
        )


def answer_in_prompt(step: StepEvidence) -> Result:
    """Find prompts that contain the reference answer."""
    tasks: dict[str, tuple[Task, str]] = {}
    for episode in step.episodes:
        if episode.calls and episode.calls[0].messages:
            text = "\n".join(text_of(message) for message in episode.calls[0].messages[:-1])
            tasks.setdefault(episode.task.task_id, (episode.task, text))
    found, compared, answers = 0, 0, set()
    for task, text in tasks.values():
        if (expected := reference(task)) is None:
            continue
        # The task itself may contain the answer, for example among choices.
        others = {name: value for name, value in task.metadata.items() if name not in REFERENCE_FIELDS}
        if expected in f"{task.main_query} {task.init_messages} {others}".replace(",", "").lower():
            continue
        compared += 1
        answers.add(expected)
        plain = text.replace(task.main_query, " ").replace(",", "").lower()
        found += re.search(rf"(?<![\w.]){re.escape(expected)}(?!\w|\.\d)", plain) is not None
    # Fixed parts of the prompt, such as examples, contain only a few tasks' answers.
    if compared >= 4 and found == compared and len(answers) > compared / 2:
        yield (
            f"the prompts of all {compared} tasks contain the reference answer outside of the question: the model is "
            "shown the answer",
            "leave the reference answer (task.metadata) out of the messages that the workflow sends",
        )


def retokenised_by_client(step: StepEvidence) -> Result:
    """Find answers that the agent returns to the model in a different form."""
    yield from _forks(step, "retokenised_by_client", "an earlier answer in a different form than the model sampled")


def system_prompt_changed(step: StepEvidence) -> Result:
    """Find conversations whose system message changes between two calls."""
    yield from _forks(step, "system_changed", "a different system message than in the previous call")


def _forks(step: StepEvidence, cause: str, text: str) -> Result:
    forked = [e for e in step.episodes if any(call.fork is not None and call.fork.cause == cause for call in e.calls)]
    several = [episode for episode in step.episodes if len(episode.calls) > 1]
    # In a few conversations, a fork can have an ordinary cause, such as an unusual answer that a framework rewrites.
    if len(forked) >= 2 and len(forked) > len(several) / 4:
        yield (
            f"{len(forked)} of {len(several)} conversations with several calls sent {text} (fork {cause}), so their "
            "calls are trained as separate samples",
            fix_for(cause),
        )


def observations_never_change(step: StepEvidence) -> Result:
    """Find an environment that returns the same observation for every action of an episode."""
    constant: list[tuple[str, int]] = []
    tasks = set()
    longer = 0
    for episode in step.episodes:
        observations, actions = [], []
        for before, after in pairwise(Transcript.of(episode).messages):
            if before.get("role") == "assistant" and after.get("role") in ("user", "tool"):
                observations.append(text_of(after))
                actions.append(f"{text_of(before)}{[call.get('function') for call in before.get('tool_calls') or ()]}")
        if len(observations) < 2 or len(set(actions)) < 2:
            continue
        longer += 1
        tasks.add(episode.task.task_id)
        if len(set(observations)) == 1:
            constant.append((observations[0], len(observations)))
    # A fixed reply such as "continue" is the same in all episodes; an observation depends on the task.
    if longer >= 4 and len(tasks) >= 2 and len(constant) == longer and len({text for text, _ in constant}) >= 2:
        yield (
            f"in all {longer} episodes with several actions, every observation equals the first observation, for "
            f"example {constant[0][1]} times {constant[0][0][:100]!r}: the environment does not advance",
            "return the observation that follows the action: check that the workflow steps the environment and does "
            "not read the initial state again",
        )


def tool_always_fails(step: StepEvidence) -> Result:
    """Find a tool all of whose calls end with the same error."""
    results: dict[str, list[tuple[str, str, str]]] = defaultdict(list)
    for episode in step.episodes:
        for name, arguments, text in Transcript.of(episode).results:
            results[name].append((episode.task.task_id, arguments, text))
    for name, calls in results.items():
        texts = [text for _, _, text in calls]
        failures = {re.sub(r"\d+|0x[0-9a-f]+", "#", text.strip()[:300]) for text in texts}
        # A model that uses a tool wrongly gets different errors, about its arguments.
        if (
            len(calls) >= 4
            and len({task for task, _, _ in calls}) >= 2
            and len(failures) <= max(1, len(calls) // 8)
            and all(FAILURE.search(text.strip()) for text in texts)
            and not any(_CALLERS_MISTAKE.search(text) for text in texts)
        ):
            yield (
                f"all {len(calls)} calls of the tool {short_repr(name)} failed with the same error: "
                f"{texts[0].strip()[:200]}",
                f"repair the tool {short_repr(name)} or its requirements (network, service, file), or remove the tool "
                "from the workflow",
            )


def same_tasks_again(step: StepEvidence) -> Result:
    """Find a step that repeats the tasks of the previous step, although there are other tasks."""
    tasks = frozenset(episode.task.task_id for episode in step.episodes)
    total = len(step.start.tasks.training)
    reader = step.start.config.task_reader
    if reader.curriculum.enable or any(entry.type == "difficulty" for entry in reader.filters):
        return  # few tasks may be left, or preferred
    # With shuffling, an epoch may end and begin with the same task, but a repeated batch of several tasks is a bug.
    if len(tasks) >= 3 and tasks == step.previous_tasks and total >= 3 * len(tasks):
        yield (
            f"the {len(tasks)} tasks of this step are the same as in the previous step, although there are {total} "
            "training tasks: the reader does not advance",
            "check the order of the tasks: data.shuffle, and a task_reader that returns new tasks",
        )


def fix_for(cause: str) -> str:
    """Return the meaning of a fork's cause and what to try against it, in one sentence."""
    unknown = "this version of astuner does not know the cause; use the version that wrote the record"
    return _FIXES.get(cause, unknown)


def fixes_for(causes: Iterable[str]) -> dict[str, str]:
    """Return the fixes by cause, in the order of `ForkCause`; unknown causes come last."""
    order = get_args(ForkCause)
    ordered = sorted(set(causes), key=lambda cause: (order.index(cause) if cause in order else len(order), cause))
    return {cause: fix_for(cause) for cause in ordered}
