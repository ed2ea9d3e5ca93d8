"""The faults: where each was reported, how it is injected, and what the product has to say about it.

The words follow from the fault: what is wrong and what to change. They are not taken from the product's messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.faults import injections
from tests.bench.faults.runs import AGENTS, Report, Run, math_run


@dataclass(frozen=True)
class Fault:
    """A fault of the benchmark.

    Attributes:
        name: its name in the result.
        source: a thread of the field in which it was reported.
        words: regular expressions that one message must match, all of them, in any order and case: those of what is
            wrong and those of what to change.
        change: changes an ordinary run so that it has the fault.
        from_step: the step in which the fault has its first effect.
        steps: number of steps of the run.
    """

    name: str
    source: str
    words: tuple[str, ...]
    change: Callable[[Run], None]
    from_step: int = 1
    steps: int = 2

    def prepare(self, folder: Path) -> Run:
        """Return the run with the fault."""
        run = math_run(folder, self.steps)
        self.change(run)
        return run

    def named_in(self, report: Report) -> int | None:
        """Return the step in which the product named the fault; None if it did not."""
        steps = [step for step, _, text in report.findings if self._names(text)]
        if self._names(report.error) and not report.error.startswith("internal error"):
            steps.append(report.steps + 1)  # the step that the error ended
        return min(steps, default=None)

    def _names(self, text: str) -> bool:
        return all(re.search(word, text, re.IGNORECASE | re.DOTALL) for word in self.words)


def keys(**values: Any) -> Callable[[Run], None]:
    """Return a change of configuration keys; `__` stands for a dot."""
    return lambda run: run.keys.update({key.replace("__", "."): value for key, value in values.items()})


def workflow(name: str, **values: Any) -> Callable[[Run], None]:
    """Return a change of the workflow, and of keys."""
    return keys(rollout__agentscope_workflow=f"{AGENTS}->{name}", **values)


def judge(name: str) -> Callable[[Run], None]:
    """Return a change of the judge."""
    return keys(task_judge__judge_protocol=f"{AGENTS}->{name}")


def patched(patch: Callable[[], None], **values: Any) -> Callable[[Run], None]:
    """Return a change of a component, and of keys."""

    def change(run: Run) -> None:
        run.patch = patch
        keys(**values)(run)

    return change


def rows(change: Callable[[int, dict[str, Any]], dict[str, Any]]) -> Callable[[Run], None]:
    """Return a change of the rows of the training data."""

    def apply(run: Run) -> None:
        run.training = [change(index, row) for index, row in enumerate(run.training)]

    return apply


def template(change: Callable[[str], str], **values: Any) -> Callable[[Run], None]:
    """Return a change of the chat template; the run renders with the template of the tokenizer."""

    def apply(run: Run) -> None:
        folder = run.copy_of_model()
        (folder / "astuner_renderer.json").unlink()
        file = folder / "chat_template.jinja"
        changed = change(file.read_text())
        assert changed != file.read_text()
        file.write_text(changed)
        run.keys["model.renderer"] = {"name": "default", "tool_parser": "qwen3"}
        keys(**values)(run)

    return apply


def tokenizer_config(values: Mapping[str, Any]) -> Callable[[Run], None]:
    """Return a change of tokenizer_config.json."""

    def apply(run: Run) -> None:
        file = run.copy_of_model() / "tokenizer_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    return apply


def several(*changes: Callable[[Run], None]) -> Callable[[Run], None]:
    """Return several changes as one."""

    def apply(run: Run) -> None:
        for change in changes:
            change(run)

    return apply


def other_vocabulary(run: Run) -> None:
    """Give the tokenizer's tokens other ids."""
    folder = run.copy_of_model()
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    size = 1 + max([*content["model"]["vocab"].values(), *(token["id"] for token in content["added_tokens"])])
    ids = injections.permuted_ids(size)
    content["model"]["vocab"] = {text: ids[number] for text, number in content["model"]["vocab"].items()}
    for token in content["added_tokens"]:
        token["id"] = ids[token["id"]]
    content["added_tokens"].sort(key=lambda token: token["id"])
    file.write_text(json.dumps(content))


def shared_validation(run: Run) -> None:
    """Validate on training tasks."""
    run.validation = [*run.validation, *run.training[:4]]


def without_tools(text: str) -> str:
    """Return a template that ignores `tools`."""
    return text.replace("{%- if tools %}", "{%- if false %}", 1)


def without_system(text: str) -> str:
    """Return a template that leaves the system message out, with tools and without."""
    text = text.replace("{{- messages[0].content + '\\n\\n' }}", "")
    return re.sub(r"\{%- elif messages\[0\]\.role == 'system' %\}\n.*?\n", "", text, count=1)


LLAMA = (
    "{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n{{ message.content }}"
    "<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)

FAULTS: tuple[Fault, ...] = (
    Fault(
        "tools_not_in_template",
        "",
        ("tool", "template", "never sees|not render|leaves? .*out"),
        template(without_tools),
    ),
    Fault(
        "tool_parser_never_fires",
        "",
        ("tool call", "pars", "renderer|tool_parser"),
        keys(model__renderer={"name": "default", "tool_parser": "deepseek-v3"}),
    ),
    Fault("answer_retokenised_by_client", "", ("retokenised", "unchanged"), workflow("RetokenisedByClient")),
    Fault("system_prompt_changes", "", ("system", "chang|another", "same"), workflow("SystemChanges")),
    Fault("judge_gives_zero_to_all", "", ("judge", "reference", "same reward|reward 0|lowest"), judge("GivesZero")),
    Fault(
        "judge_gives_zero_to_crashed",
        "",
        ("crash", "reward|scored", "raise|leave|exception"),
        workflow("SwallowsCrash"),
    ),
    Fault("judge_gives_nan", "", ("judge|reward", "nan", "division|empty|missing|finite"), judge("GivesNan")),
    Fault(
        "reward_column_is_text",
        "",
        ("reward", "text|string|str", "number|float"),
        several(judge("ReadsRewardColumn"), rows(lambda _, row: {**row, "reward": "1.0"})),
    ),
    Fault("validation_in_training", "", ("validation", "training", "remove|other data"), shared_validation),
    Fault(
        "mask_off_by_one", "", ("mask", "off by one|shift", "bug|report|remove"), patched(injections.mask_off_by_one)
    ),
    Fault("group_of_one", "", ("num_repeat", "at least 2|4 or more", "compare"), keys(rollout__num_repeat=1)),
    Fault(
        "advantages_of_another_batch",
        "",
        ("advantage", "reward", "other|another"),
        patched(injections.advantages_of_batch_before),
        from_step=2,
        steps=3,
    ),
    Fault(
        "stale_weights",
        "",
        ("stale|old", "weights", "sync|transfer"),
        patched(injections.stale_weights),
        from_step=2,
        steps=3,
    ),
    Fault("wrong_chat_template", "", ("template", "wrong", "tokenizer|model.renderer"), template(lambda _: LLAMA)),
    Fault(
        "end_token_never_sampled",
        "",
        ("end|eos", "token", "eos_token|template"),
        several(
            template(lambda text: text.replace("<|im_end|>", "<|endoftext|>")),
            tokenizer_config({"eos_token": "<|endoftext|>"}),
        ),
    ),
    Fault(
        "every_answer_truncated",
        "",
        ("truncated|cut", "all|every", "max_response_length_in_one_turn"),
        keys(rollout__max_response_length_in_one_turn=3),
    ),
    Fault(
        "greedy_training", "", ("temperature", "greed|equal|same", "0\\.7|1\\.0|raise"), keys(rollout__temperature=0.0)
    ),
    Fault("learning_rate_0", "", ("lr", "0", "greater|raise|larger|positive"), keys(trainer_common__optim__lr=0.0)),
    Fault("learning_rate_1000", "", ("lr", "1000", "lower|less than or equal"), keys(trainer_common__optim__lr=1000.0)),
    Fault(
        "lora_not_attached",
        "",
        ("lora|adapter", "no .*weight|not attached|nothing", "target_modules"),
        patched(injections.adapters_not_attached, model__lora__rank=8),
    ),
    Fault("tokenizer_of_another_model", "", ("tokenizer", "model", "use|copy"), other_vocabulary),
    Fault(
        "logprobs_at_another_temperature",
        "",
        ("logprob", "temperature", "rollout.temperature|processed_logprobs"),
        patched(injections.other_temperature, rollout__temperature=0.7),
    ),
    Fault(
        "doubled_bos",
        "",
        ("bos|begin", "double|2|twice", "template|add_bos_token"),
        several(
            template(lambda text: "{{ bos_token }}{{ bos_token }}" + text),
            tokenizer_config({"bos_token": "<|endoftext|>"}),
        ),
    ),
    Fault(
        "environment_never_advances", "", ("observation|environment", "same", "step|advance"), workflow("FrozenWalk")
    ),
    Fault("cache_answers_other_prompt", "", ("cache", "prompt", "turn off|key"), patched(injections.cache_of_answers)),
    Fault("tool_always_fails", "", ("tool", "fail", "repair|fix|check|remove"), workflow("ToolAlwaysFails")),
    Fault(
        "seeds_all_equal",
        "",
        ("seed", "equal|same|identical", "own seed|different seed"),
        patched(injections.equal_seeds),
    ),
    Fault("judge_gives_one_to_all", "", ("judge", "every|all", "reference"), judge("GivesOne")),
    Fault("reward_is_inverted", "", ("invert|contradict|direction", "reward", "judge"), judge("Inverted")),
    Fault("system_prompt_not_in_template", "", ("system", "template", "renders?"), template(without_system)),
    Fault(
        "results_of_tools_trained",
        "",
        ("mask", "tool|not sample", "report|remove"),
        patched(injections.results_of_tools_trained),
    ),
    Fault(
        "end_tokens_not_trained",
        "",
        ("mask", "miss|end", "padding|end token"),
        patched(injections.end_tokens_not_trained),
    ),
    Fault("workflow_ignores_task", "", ("prompt", "same", "main_query|task"), workflow("IgnoresTask")),
    Fault("answer_in_prompt", "", ("prompt", "answer", "leave|remove"), workflow("ShowsAnswer")),
    Fault(
        "prefix_cache_kept_over_update",
        "",
        ("cache", "weights", "clear|reset"),
        patched(injections.prefix_cache_kept, trainer_common__total_epochs=3),
        from_step=2,
        steps=3,
    ),
    Fault("no_gradient", "", ("gradient", "0|zero", "trainable|mask|target_modules"), patched(injections.no_gradient)),
    Fault(
        "optimiser_has_no_effect",
        "",
        ("weight", "no .*changed|unchanged", "optimiser|lr"),
        patched(injections.optimiser_without_effect),
    ),
    Fault(
        "same_batch_every_step",
        "",
        ("tasks", "same", "shuffle|order|reader"),
        patched(injections.same_batch),
        from_step=2,
    ),
    Fault(
        "adapters_not_sent_to_engine",
        "",
        ("weights|adapter", "engine", "sync|transfer|merged"),
        patched(injections.adapters_not_sent, model__lora__rank=8, trainer_common__optim__lr=3e-3),
        from_step=2,
        steps=3,
    ),
    Fault(
        "references_are_missing",
        "",
        ("answer", "empty|missing", "fill|remove"),
        rows(lambda index, row: {**row, "answer": row["answer"] if index % 4 == 0 else ""}),
    ),
)
