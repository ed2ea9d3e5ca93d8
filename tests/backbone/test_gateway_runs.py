"""Whole runs of a workflow that calls the model only with OpenAI's client and an address."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from astuner import AstunerJob
from astuner.cli.main import astuner as command
from astuner.run_record import read_episode, read_index

AGENT = """
from openai import OpenAI

from astuner import ModelTuner, Workflow, WorkflowOutput, WorkflowTask


class Speaks(Workflow):
    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        base_url, api_key = model_tuner.as_oai_baseurl_apikey(agent_name="speaker")
        text, messages = "", [{"role": "user", "content": workflow_task.task.main_query}]
        with OpenAI(base_url=base_url, api_key=api_key) as client:
            for streamed in (False, True):
                answer = client.chat.completions.create(model="astuner", messages=messages, stream=streamed)
                if streamed:
                    content = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
                else:
                    content = answer.choices[0].message.content
                text += content
                messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "go on"}]
        return WorkflowOutput(reward=sum(char.isalpha() for char in text) / max(len(text), 1))
"""


@pytest.mark.parametrize(("backbone", "parallel"), [("debug", 1), ("debug", 2), ("local", 2)])
def test_a_run_of_an_agent_that_knows_only_the_address(
    backbone: str, parallel: int, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "")  # so that the run's changes are undone
    for name in ("HTTP_PROXY", "http_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nothing listens there
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"question": f"question {i}"}) + "\n" for i in range(4)))
    job = AstunerJob(
        algorithm="grpo",
        model=model_folder,
        experiment_name="run",
        experiment_dir=str(tmp_path / "record"),
        backbone="local",
        model__renderer="qwen3",
        data__train_batch_size=2,
        rollout__num_repeat=2,
        debug__debug_max_parallel=parallel,
        rollout__max_env_worker=2,
        rollout__temperature=1.0,
        rollout__max_response_length_in_one_turn=6,
        rollout__max_model_len=256,
        rollout__compute_madness_checklist=[],
        trainer_common__total_training_steps=1,
    )
    job.set_workflow(f"{tmp_path / 'agent.py'}->Speaks").set_data("file", tmp_path / "train.jsonl")
    job.dump_job_as_yaml(tmp_path / "run.yaml")
    monkeypatch.chdir(tmp_path)
    assert command.main(["--conf", "run.yaml", f"--backbone={backbone}"], standalone_mode=False) in (None, 0)
    record = tmp_path / ("record-debug" if backbone == "debug" else "record")
    episodes = [read_episode(record / entry.path) for entry in read_index(record)]
    assert len(episodes) == 4
    for episode in episodes:
        assert episode.status == "ok", episode.error
        assert [call.agent_name for call in episode.calls] == ["speaker", "speaker"]
        assert not any(call.cut for call in episode.calls)
        if backbone == "local":
            assert sum(sum(sample.train_counts) for sample in episode.samples) == sum(
                len(call.completion_ids) for call in episode.calls
            )
