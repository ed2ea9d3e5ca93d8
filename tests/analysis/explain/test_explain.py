"""`astuner explain`, on records made with the model tuner and the run record of astuner."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from astuner.config.root import AstunerConfig
from astuner.context_tracker.merge import build_samples, limit_samples
from astuner.diagnostics.prompt_checks import fix_for
from astuner.model_tuner.chat_options import CallSettings
from astuner.model_tuner.codec import ChatCodec
from astuner.model_tuner.tuner import ModelTuner
from astuner.run_record.record import RunRecord
from astuner.run_record.updates import SampleUpdate, count_trained_tokens
from astuner.schema import Anomaly, Episode, EpisodeStatus, ForkCause, Judgement, LlmCall, Task
from astuner.task_rollout.statistics import tokens_of
from tests.launcher.conftest import Command
from tests.scripted_engine import ScriptedEngine

SECRET = "plainlooking-0a1b2c3d"
TOOLS = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>'
THOUGHT = "<think>\nIs it?\n</think>\n\n3<|im_end|>"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@dataclass(frozen=True)
class Agents:
    """Agents with scripted model answers."""

    tokenizer: Any
    renderer: Any = "qwen3"

    def _tuner(self, episode_id: str, answers: Sequence[str]) -> ModelTuner:
        left = [self.tokenizer.encode(answer, add_special_tokens=False) for answer in answers]
        engine = ScriptedEngine(lambda prompt, params: left.pop(0), max_model_len=4096)
        return ModelTuner(engine, ChatCodec(self.tokenizer, self.renderer), CallSettings(), episode_id=episode_id)

    def uses_a_tool(self, episode_id: str, question: str = "1+2?") -> tuple[LlmCall, ...]:
        """Two calls, of which the second extends the first."""

        async def run(tuner: ModelTuner) -> None:
            first = await tuner.chat([user(question)], tools=TOOLS)
            result = {"role": "tool", "content": "3", "tool_call_id": first.parsed.tool_calls[0].id}
            await tuner.chat([user(question), first.call.messages[-1], result], tools=TOOLS)

        tuner = self._tuner(episode_id, [CALL, "3<|im_end|>"])
        asyncio.run(run(tuner))
        return tuple(tuner.calls)

    def asks_again(self, episode_id: str) -> tuple[LlmCall, ...]:
        """Three calls. Qwen3's template drops the thinking of the first; the third has different tools."""

        async def run(tuner: ModelTuner) -> None:
            first = await tuner.chat([user("1+2?")])
            again = [user("1+2?"), first.call.messages[-1], user("[sure]?")]
            second = await tuner.chat(again)
            await tuner.chat([*again, second.call.messages[-1], user("really?")], tools=TOOLS)

        tuner = self._tuner(episode_id, [THOUGHT] * 3)
        asyncio.run(run(tuner))
        return tuple(replace(call, agent_name="friday") for call in tuner.calls)


def an_episode(
    episode_id: str, calls: tuple[LlmCall, ...], status: EpisodeStatus = "ok", most: int = 30, **fields: Any
) -> Episode:
    samples, left_out = limit_samples(build_samples(calls), most, 0) if status == "ok" else ([], 0)
    reward = None if status == "failed" else 1.0
    return Episode(
        episode_id, Task(episode_id.rpartition("-")[0], "1+2?"), 0, status, reward, reward and True, calls,
        tuple(samples), left_out, start_time=10.0, end_time=12.5, **fields,
    )  # fmt: skip


TRACEBACK = "\n".join(
    ["Traceback (most recent call last):", *(f"  line {number}" for number in range(60)), "ValueError: [no] tool"]
)

ANOMALY = Anomaly("repetition", "repeats itself (20 times '[ha]')", "train-2-fails-0/0", 1, "friday")


@pytest.fixture
def agents(tokenizer: Any) -> Agents:
    return Agents(tokenizer)


@pytest.fixture
def run(folder: Path, agents: Agents, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The record of two steps with one episode of every kind, and a validation."""
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    with RunRecord.open(
        Path("launcher_record/math"), backbone="local", config_yaml="", resume=False, loggers=()
    ) as record:
        for step, split, episode in (
            (1, "train", an_episode("train-1-tool-0", agents.uses_a_tool("train-1-tool-0"))),
            (1, "train", an_episode("train-1-again-0", agents.asks_again("train-1-again-0"))),
            (2, "train", an_episode("train-2-fails-0", agents.uses_a_tool("train-2-fails-0")[:1], "failed",
                                    error_kind="workflow", error="ValueError: [no] tool", error_traceback=TRACEBACK,
                                    process_effects=("working directory: /[gone]",),
                                    ended_processes=("sleep 60 (7)",), anomaly=ANOMALY)),
            (2, "train", an_episode("train-2-empty-0", (), "dropped", error_kind="no_tokens", error="no call")),
            (2, "train", an_episode("train-2-secret-0", agents.uses_a_tool("train-2-secret-0", f"is it {SECRET}?"))),
            (2, "train", an_episode("train-2-again-0", agents.asks_again("train-2-again-0"), most=1)),
            (2, "val", an_episode("val-2-tool-0", agents.uses_a_tool("val-2-tool-0"))),
        ):  # fmt: skip
            record.write_episode(step, split, episode, 0.5, tokens_of([episode]))  # type: ignore[arg-type]
    return record.folder


@pytest.fixture
def explained(run: Path, astuner: Command) -> Any:
    """Return a function that runs `astuner explain math … --json` and parses the output."""

    def explain(*arguments: str) -> Any:
        ended = astuner("explain", "math", *arguments, "--json")
        assert ended.code == 0, ended.out
        return json.loads(ended.out)

    return explain


def test_a_failed_episode_shows_its_traceback_and_what_it_left(explained: Any, astuner: Command):
    printed = explained("train-2-fails-0")
    assert printed["error_traceback"] == TRACEBACK
    assert printed["process_effects"] == ["working directory: /[gone]"]
    assert printed["ended_processes"] == ["sleep 60 (7)"]
    assert printed["anomaly"] == asdict(ANOMALY)
    text = " ".join(astuner("explain", "math", "train-2-fails-0").out.split())
    assert "the last 40 of 62 lines of the traceback; --json has all" in text
    assert "line 59" in text
    assert "line 10 " not in text
    assert "ValueError: [no] tool" in text
    assert "changed settings of the process, which were restored: working directory: /[gone]" in text
    assert "degenerate output in call 1 of agent friday: repetition: repeats itself (20 times '[ha]')" in text
    assert "left processes running, which astuner ended: sleep 60 (7)" in text
    assert explained("train-1-tool-0")["error_traceback"] is None


def test_long_names_are_shortened_in_text(folder: Path, agents: Agents, astuner: Command):
    long = f"train-1-{'x' * 100_000}-0"
    with RunRecord.open(
        Path("launcher_record/math"), backbone="local", config_yaml="", resume=False, loggers=()
    ) as record:
        calls = tuple(
            replace(call, agent_name=long, target_tag=long, call_id=f"{long}/{number}", reward=1.0)
            for number, call in enumerate(agents.asks_again(long))
        )
        forked = an_episode(long, calls)
        samples = tuple(
            replace(sample, spans=tuple(replace(span, call_id=f"unknown {long}") for span in sample.spans))
            for sample in forked.samples
        )
        episodes = (
            replace(forked, samples=samples, agent_rewards={long: 1.0}),
            an_episode(f"{long}-failed", (), "failed", error_kind="workflow", error=long, error_traceback=long),
        )
        for episode in episodes:
            record.write_episode(1, "train", episode, 0.5, tokens_of([episode]))
    for words in ((), (long,), (f"{long}-failed",)):
        ended = astuner("explain", "math", *words)
        assert ended.code == 0, ended.out
        assert 300 < len("".join(ended.out.split())) < 12_000


def test_a_run_as_json(explained: Any, run: Path):
    printed = explained()
    total, steps = printed["total"], printed["steps"]
    assert {name: total[name] for name in ("ok", "failed", "dropped", "calls", "samples", "dropped_samples")} == {
        "ok": 4, "failed": 1, "dropped": 1, "calls": 11, "samples": 6, "dropped_samples": 2,
    }  # fmt: skip
    assert total["tokens_raw"] > total["tokens_distinct"] > total["tokens_trained"] > 0
    assert total["saving"] == total["tokens_raw"] / total["tokens_distinct"]
    assert total["forks"] == {"template_rewrote_history": 2, "tools_changed": 2}
    assert total["reward"] == 1.0
    assert list(steps) == ["1", "2"]
    assert sum(step["tokens_raw"] for step in steps.values()) == total["tokens_raw"]
    assert (steps["1"]["ok"], steps["2"]["ok"], steps["2"]["failed"]) == (2, 2, 1)
    assert printed["certificate"] == {
        "share": 1.0, "calls": 5, "episodes": 2, "inexact": [], "withheld": 1, "limited": 1,
    }  # fmt: skip
    assert [episode["episode_id"] for episode in printed["forked"]] == ["train-2-again-0", "train-1-again-0"]
    assert list(printed["fixes"]) == ["template_rewrote_history", "tools_changed"]


def test_parts_of_a_run(explained: Any, astuner: Command):
    assert explained("--step", "1")["total"]["ok"] == 2
    assert explained("--split", "val")["total"]["calls"] == 2
    assert explained("--no-certificate")["certificate"] is None
    astuner("explain", "math", "--step", "7").says("no train episodes of step 7: it has steps 1, 2")
    ended = astuner("explain", "math", "train-1-tool-0", "--step", "1")
    assert (ended.code, "cannot be combined with EPISODE" in ended.out) == (2, True)


def test_only_the_index_is_read_without_the_certificate(explained: Any, run: Path):
    with_files = explained()
    for file in run.glob("episodes/train/*/*.json"):
        file.unlink()
    assert explained("--no-certificate") == {**with_files, "certificate": None}


def test_forks_are_counted_for_an_index_of_an_older_version(explained: Any, run: Path):
    before, index = explained(), run / "episodes/index.jsonl"
    rows = [json.loads(line) for line in index.read_text().splitlines()]
    for row in rows:
        del row["forks"]
    index.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert explained() == before


def test_a_damaged_record_lowers_the_certificate(explained: Any, run: Path):
    (file,) = run.glob("episodes/train/step_000001/train-1-tool-*.json")
    content = json.loads(file.read_text())
    content["episode"]["samples"][0]["token_ids"][-1] += 1
    file.write_text(json.dumps(content))
    certificate = explained()["certificate"]
    assert (certificate["share"], certificate["inexact"]) == (0.8, ["train-1-tool-0"])
    assert explained("train-1-tool-0")["certificate"] == 0.5


def test_a_run_as_text(astuner: Command, run: Path, monkeypatch: pytest.MonkeyPatch):
    for width in (80, 100):
        monkeypatch.setenv("COLUMNS", str(width))
        printed = astuner("explain", "math").out
        assert "launcher_record/math, training episodes of 2 steps" in printed
        assert "4 ok, 1 failed, 1 dropped; mean reward 1.000" in printed
        assert "11 calls → 6 samples (2 more dropped)" in printed
        assert "forks        2 template_rewrote_history, 2 tools_changed" in printed
        assert "100%: 5 trained calls of 2 trained episodes rebuilt exactly" in printed
        assert "token ids are withheld" in " ".join(printed.split())
        assert "astuner explain launcher_record/math train-2-again-0" in printed
        assert "model.renderer: {name: qwen3, thinking_retention: all}" in " ".join(printed.split())
        assert [line for line in printed.splitlines() if len(line) > width] == []


def test_an_episode_as_json(explained: Any):
    printed = explained("train-1-again-0")
    assert [call["call"] for call in printed["calls"]] == [1, 2, 3]
    assert [call["extends"] for call in printed["calls"]] == [None, None, None]
    assert {call["agent_name"] for call in printed["calls"]} == {"friday"}
    assert printed["calls"][0]["shared_tokens"] == 0
    fork = printed["calls"][1]["fork"]
    assert (fork["cause"], fork["call"], fork["message_index"]) == ("template_rewrote_history", 1, 1)
    assert fork["position"] == printed["calls"][1]["shared_tokens"]
    assert fork["expected"].startswith("<think>")
    assert fork["found"].startswith("3")
    assert printed["calls"][2]["fork"]["cause"] == "tools_changed"
    assert [span["call"] for timeline in printed["timelines"] for span in timeline["calls"]].count(1) == 1
    assert {call["timeline"] for call in printed["calls"]} == {1, 2, 3}
    assert sum(timeline["trained"] for timeline in printed["timelines"]) == printed["tokens_trained"]
    assert (printed["certificate"], printed["certificate_note"], printed["advantage"]) == (1.0, None, 0.5)
    tool = explained("train-1-t")  # enough of the id
    assert [call["extends"] for call in tool["calls"]] == [None, 1]
    (timeline,) = tool["timelines"]
    assert [(span["call"], span["end"]) for span in timeline["calls"]][-1] == (2, timeline["tokens"])
    assert tool["fixes"] == {}


def test_notes_of_episodes_without_a_certificate(explained: Any, astuner: Command):
    secret = explained("train-2-secret-0")
    assert secret["certificate"] is None
    assert "the token ids are not in the record" in secret["certificate_note"]
    assert [call["prompt_tokens"] for call in secret["calls"]] == [None, None]
    assert secret["tokens_raw"] > secret["tokens_distinct"] > 0
    assert "has status 'failed' and is not trained" in explained("train-2-fails-0")["certificate_note"]
    assert explained("train-2-empty-0")["calls"] == []
    limited = explained("train-2-again-0")
    assert limited["certificate"] == pytest.approx(1 / 3)
    assert "max_sample_per_task were dropped" in limited["certificate_note"]
    assert "its texts held a secret" in astuner("explain", "math", "train-2-secret-0").out
    assert "[workflow] ValueError: [no] tool" in astuner("explain", "math", "train-2-fails-0").out


def test_an_episode_as_text(astuner: Command, run: Path, monkeypatch: pytest.MonkeyPatch):
    for width in (80, 100):
        monkeypatch.setenv("COLUMNS", str(width))
        printed = astuner("explain", str(run), "train-1-again").out
        assert "ok · reward 1 · success · advantage +0.50 · 2.5 s" in printed
        assert "call 2 forks from call 1: template_rewrote_history" in printed
        assert "it should extend that call, but differs from token 1" in printed
        assert "on, in messages[1]" in printed
        assert "expected  '<think>" in printed
        assert "certificate  1.00: the samples rebuild every trained call, token for token" in printed
        assert "what to try" in printed
        assert [line for line in printed.splitlines() if len(line) > width] == []


def test_unknown_names(astuner: Command, run: Path, folder: Path):
    astuner("explain", "maht").says("'maht' is not a run", "did you mean 'math'?", "existing runs: math")
    astuner("explain", "math", "--exp-dir", "elsewhere").says(
        "'math' is not a run", "elsewhere (--exp-dir); there are no runs"
    )
    astuner("explain", "math", "train-2").says("4 episodes of the run start with 'train-2'", "train-2-fails-0")
    astuner("explain", "math", "train-1-toll-0").says("no episode 'train-1-toll-0'", "similar ids: train-1-tool-0")
    astuner("explain", "math", "again").says("ids that contain it: train-1-again-0, train-2-again-0")
    astuner("explain", "math", "∞").says("examples of its ids: train-1-tool-0")
    (folder / "launcher_record/other").mkdir()  # no run
    assert "other" not in astuner("explain", "maht").out
    with RunRecord.open(Path("launcher_record/sft"), backbone="local", config_yaml="", resume=False, loggers=()):
        pass
    astuner("explain", "sft").says("has no episodes")
    astuner("explain", "sft", "e").says("no episode is recorded yet")


def test_excerpts_of_forks_do_not_leak_secrets(run: Path, agents: Agents):
    calls = agents.asks_again("e")
    spelled = tuple(replace(call, messages=({"role": "user", "content": SECRET},)) for call in calls)
    with RunRecord.open(Path("launcher_record/more"), backbone="local", config_yaml="", resume=False, loggers=()) as to:
        path = to.write_episode(1, "train", an_episode("e", spelled))
    forks = [call["fork"] for call in json.loads(path.read_text())["episode"]["calls"]]
    for fork in forks[1:]:
        assert (fork["expected"], fork["found"], fork["expected_ids"], fork["found_ids"]) == ("", "", [], [])


@pytest.mark.parametrize("cause", get_args(ForkCause))
def test_every_cause_has_a_fix_and_names_keys_that_exist(cause: str):
    fix = fix_for(cause)
    assert "does not know" not in fix
    for word in fix.replace(":", " ").replace(",", " ").replace(";", " ").split():
        section, dot, _ = word.partition(".")
        if dot and section in AstunerConfig.model_fields:
            at: Any = AstunerConfig()
            for part in word.split("."):
                assert isinstance(at, BaseModel), word
                at = getattr(at, part)


def test_the_fix_for_a_template_that_rewrites_history_works(agents: Agents):
    assert any(call.fork for call in agents.asks_again("e")[:2])
    fixed = replace(agents, renderer={"name": "qwen3", "thinking_retention": "all"})
    assert not any(call.fork for call in fixed.asks_again("e")[:2])


def test_training_and_rewards_of_calls(agents: Agents, folder: Path, astuner: Command):
    first, second = agents.uses_a_tool("train-1-duel-0")
    external = replace(first, call_id="external", trained=False, prompt_ids=(), completion_ids=(), logprobs=())
    calls = (
        replace(external, agent_name="critic", target_tag="critic"),
        replace(first, agent_name="solver", reward=1.0),
        replace(second, agent_name="solver", reward=1.0),
    )
    with RunRecord.open(
        Path("launcher_record/duel"), backbone="local", config_yaml="", resume=False, loggers=()
    ) as record:
        record.write_episode(1, "train", an_episode("train-1-duel-0", calls, agent_rewards={"solver": 1.0}), None)
    ended = astuner("explain", "duel", "train-1-duel-0", "--json")
    printed = json.loads(ended.out)["calls"]
    assert [(call["agent_name"], call["trained"], call["reward"], call["extends"]) for call in printed] == [
        ("critic", False, None, None),
        ("solver", True, 1.0, None),
        ("solver", True, 1.0, 2),
    ]
    shown = astuner("explain", "duel", "train-1-duel-0").out
    assert "not trained" in shown
    assert "reward 1 (the mean of solver 1)" in shown
    assert "reward" in shown.partition("call ")[2].partition("\n")[0]


def test_the_judgement_is_shown(folder: Path, agents: Agents, astuner: Command):
    judgement = Judgement(0.5, False, {"correct": 0.0, "brief": 1.0}, explanation="4 is wrong", metrics={"tokens": 7.0})
    with RunRecord.open(
        Path("launcher_record/judged"), backbone="local", config_yaml="", resume=False, loggers=()
    ) as record:
        episode = an_episode("train-1-judged-0", agents.uses_a_tool("train-1-judged-0"), judgement=judgement)
        record.write_episode(1, "train", episode, None)
    printed = json.loads(astuner("explain", "judged", "train-1-judged-0", "--json").out)["judgement"]
    assert (printed["components"], printed["explanation"]) == ({"correct": 0.0, "brief": 1.0}, "4 is wrong")
    shown = astuner("explain", "judged", "train-1-judged-0").out
    for line in ("components of the reward: correct 0, brief 1", "metrics of the judge: tokens 7", "judge: 4 is wrong"):
        assert line in shown


def test_advantages_of_calls(folder: Path, agents: Agents, astuner: Command):
    calls = tuple(replace(call, reward=float(n)) for n, call in enumerate(agents.uses_a_tool("train-1-apart-0")))
    episode = an_episode("train-1-apart-0", calls)
    (sample,) = episode.samples
    first = sample.spans[0].end - sample.spans[0].start
    updates = [SampleUpdate(((first, -0.25), (count_trained_tokens(sample) - first, 0.75)))]
    with RunRecord.open(
        Path("launcher_record/apart"), backbone="local", config_yaml="", resume=False, loggers=()
    ) as record:
        record.write_episode(1, "train", episode, 0.5, updates=updates)
    printed = json.loads(astuner("explain", "apart", "train-1-apart-0", "--json").out)
    assert [call["advantage"] for call in printed["calls"]] == [-0.25, 0.75]
    lines = astuner("explain", "apart", "train-1-apart-0").out.splitlines()
    head = next(number for number, line in enumerate(lines) if line.lstrip().startswith("call "))
    place = lines[head].split().index("advantage")
    assert [line.split()[place] for line in lines[head + 1 : head + 3]] == ["-0.25", "+0.75"]
