"""AstunerJob: setting up, dumping, reloading."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from astuner import AstunerJob, Workflow, WorkflowOutput
from astuner.config.loading import load_config, resolve_names
from astuner.errors import BackboneError, ConfigError


class MyWorkflow(Workflow):
    async def execute(self, workflow_task, model_tuner):  # type: ignore[no-untyped-def]
        return WorkflowOutput(reward=1.0)


class Talks(Workflow):
    async def execute(self, workflow_task, model_tuner):  # type: ignore[no-untyped-def]
        await model_tuner.chat([{"role": "user", "content": workflow_task.task.main_query}])
        return WorkflowOutput(reward=float(workflow_task.repeat_index))


class TalksABCTwice(Talks):
    pass


def job() -> AstunerJob:
    made = AstunerJob(n_gpu=8, algorithm="grpo", model="some/model", trainer_common__optim__lr=1e-5)
    return made.set_workflow(MyWorkflow).set_data(type="hf", dataset_path="openai/gsm8k")


def test_a_dumped_job_reloads_to_the_equal_job(tmp_path: Path):
    made = job()
    path = made.dump_job_as_yaml(tmp_path / "saved" / "math.yaml")
    loaded = AstunerJob().load_job_from_yaml(path)
    assert loaded == made
    assert load_config(path).config == made.config
    assert loaded != AstunerJob()


def test_a_dumped_job_has_the_keys_that_were_set(tmp_path: Path):
    written = yaml.safe_load(job().dump_job_as_yaml(tmp_path / "set.yaml").read_text())["astuner"]
    assert written["rollout"].pop("agentscope_workflow").endswith("->MyWorkflow")
    assert written == {
        "project_name": "astuner",
        "model": {"path": "some/model"},
        "task_reader": {"huggingface_dat_repo": {"dataset_path": "openai/gsm8k", "validation_split": None}},
        "rollout": {},
        "trainer_common": {"n_gpus_per_node": 8, "optim": {"lr": 1e-5}},
    }
    made = job()
    full = made.dump_job_as_yaml(tmp_path / "full.yaml", full=True)
    assert len(full.read_text().splitlines()) > 100
    assert AstunerJob().load_job_from_yaml(full) == made


def test_a_job_without_a_file_is_named_after_its_workflow(model_folder: Path, tmp_path: Path):
    (tmp_path / "tasks.jsonl").write_text('{"question": "1 + 1?"}\n{"question": "2 + 2?"}\n')
    made = AstunerJob(model=model_folder, rollout__num_repeat=2, trainer_common__total_training_steps=1)
    made.configure(
        {"data.train_batch_size": 2, "rollout.max_response_length_in_one_turn": 4, "model.renderer": "qwen3"}
    )
    made.set_workflow(TalksABCTwice).set_data("file", tmp_path / "tasks.jsonl")
    assert made.tune(tmp_path).record == tmp_path / "talks_abc_twice"


def test_the_configuration_contains_the_settings_of_the_job():
    config = job().config.astuner
    assert config.trainer_common.n_gpus_per_node == 8
    assert config.trainer_common.optim.lr == 1e-5
    assert config.task_reader.type == "huggingface_dat_repo"
    assert config.task_reader.huggingface_dat_repo.dataset_path == "openai/gsm8k"
    assert config.rollout.agentscope_workflow is not None
    assert config.rollout.agentscope_workflow.endswith("->MyWorkflow")


def test_local_files_and_judges():
    made = AstunerJob(algorithm="rloo").set_data("file", "a.jsonl", validation_path=Path("b.jsonl"))
    made.set_judge("astuner.task_judge.math_answer_as_judge->MathAnswerAsJudge")
    reader = made.config.astuner.task_reader
    assert (reader.type, reader.dataset_file.training.file_path) == ("dataset_file", "a.jsonl")
    assert reader.dataset_file.validation.file_path == "b.jsonl"


def test_a_job_may_run_in_a_thread(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks.jsonl").write_text('{"question": "1 + 1?"}\n{"question": "2 + 2?"}\n')
    made = AstunerJob(model=model_folder, rollout__num_repeat=2, trainer_common__total_training_steps=1)
    made.configure(
        {"data.train_batch_size": 2, "rollout.max_response_length_in_one_turn": 4, "model.renderer": "qwen3"}
    )
    made.set_workflow(Talks).set_data("file", "tasks.jsonl")
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(made.tune).result().metrics.steps == 1


def test_mistakes_say_what_is_expected(tmp_path: Path):
    with pytest.raises(ConfigError, match="did you mean"):
        AstunerJob(trainer_common__optim__lrr=1.0)
    with pytest.raises(ConfigError, match="adv_estimator"):
        AstunerJob(algorithm="ppo2")
    with pytest.raises(ConfigError, match="use one of"):
        AstunerJob().set_data("parquet", "x")
    with pytest.raises(ConfigError, match="subclass of Workflow"):
        AstunerJob().set_workflow(int)  # type: ignore[arg-type]

    class Inner(MyWorkflow):
        pass

    with pytest.raises(ConfigError, match="inside a function"):
        AstunerJob().set_workflow(Inner)
    with pytest.raises(ConfigError, match="model"):
        AstunerJob().set_workflow(MyWorkflow).tune()
    (tasks := tmp_path / "tasks.jsonl").write_text('{"question": "1 + 1?"}\n')
    with pytest.raises(BackboneError, match="backbone 'debug' has no trainer, so it can neither train nor evaluate"):
        AstunerJob(model="some/model", backbone="debug").set_workflow(MyWorkflow).set_data("file", tasks).tune()


def test_a_dumped_job_is_named_after_its_file_and_loads_without_notices(tmp_path: Path) -> None:
    job = AstunerJob(model="some/model", backbone="local").set_workflow("flow->Flow")
    path = job.dump_job_as_yaml(tmp_path / "math.yaml")
    loaded = load_config(path)
    assert loaded.notices == ()
    assert loaded.config == job.config
    assert resolve_names(loaded.config, loaded.path).astuner.experiment_name == "math"
