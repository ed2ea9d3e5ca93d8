"""Changes that give an ordinary run a fault: of keys, data, files of the model, workflow, judge or components."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from bench.faults import injections
from bench.faults.runs import AGENTS, Run


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


def larger_vocabulary(run: Run) -> None:
    """Give the tokenizer more tokens than the model's embedding has rows."""
    file = run.copy_of_model() / "tokenizer.json"
    content = json.loads(file.read_text())
    first = 1 + max(token["id"] for token in content["added_tokens"])
    content["added_tokens"] += [
        {**content["added_tokens"][-1], "id": first + number, "content": f"<|extra_{number}|>"} for number in range(99)
    ]
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
