"""`backbone: auto`: which backbone it is, and the GPUs that a run may ask for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from astuner import AstunerJob
from astuner.cli.main import astuner
from astuner.config.loading import check_gpus, choose_backbone, load_config, resolve_names, with_values
from astuner.config.root import RunConfig
from astuner.config.yaml_file import to_yaml
from astuner.errors import ConfigError, InstallError
from astuner.system.gpus import installed_gpus, visible_gpus

InstallGpus = Callable[[int], None]
Write = Callable[..., Path]


def choice(**values: object) -> tuple[str, str]:
    config = with_values(RunConfig(), {f"astuner.{key.replace('__', '.')}": value for key, value in values.items()})
    chosen = choose_backbone(config)
    return chosen.name, chosen.reason


@pytest.mark.parametrize(
    ("gpus", "values", "name", "reason"),
    [
        (0, {}, "local", "this machine has no GPU"),
        (1, {}, "local", "this machine has 1 GPU"),
        (2, {}, "trinity", "this machine has 2 GPUs"),
        (8, {"trainer_common__device": "cpu"}, "local", "trainer_common.device is cpu"),
        (8, {"trainer_common__n_gpus_per_node": 1}, "local", "n_gpus_per_node × nnodes asks for 1 GPU"),
        (0, {"trainer_common__n_gpus_per_node": 8}, "trinity", "n_gpus_per_node × nnodes asks for 8 GPUs"),
        (2, {"trainer_common__nnodes": 4}, "trinity", "n_gpus_per_node × nnodes asks for 8 GPUs"),
        (8, {"trainer_common__algorithm__adv_estimator": "sft"}, "local", "trinity does not support "),
        (8, {"backbone": "verl"}, "verl", ""),
        (0, {"backbone": "trinity"}, "trinity", ""),
    ],
)
def test_the_gpus_that_are_there_or_asked_for_decide(
    gpus: int, values: dict[str, object], name: str, reason: str, install_gpus: InstallGpus
):
    install_gpus(gpus)
    chosen, why = choice(**values)
    assert chosen == name
    assert why.startswith(reason)
    assert bool(why) == bool(reason)


@pytest.mark.parametrize(
    ("shown", "visible"), [("", 0), ("-1", 0), ("2", 1), ("0,3", 2), ("1,-1,2", 1), ("0,1,2,3,4", 4)]
)
def test_hidden_gpus_do_not_count(shown: str, visible: int, install_gpus: InstallGpus, monkeypatch: pytest.MonkeyPatch):
    install_gpus(4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert (installed_gpus(), visible_gpus()) == (4, visible)


def test_a_driver_that_does_not_work_has_no_gpus(install_gpus: InstallGpus, tmp_path: Path):
    install_gpus(2)
    (tmp_path / "driver/nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: NVIDIA-SMI has failed'\nexit 9\n")
    assert installed_gpus() == 0


def test_checks_and_notices_are_those_of_the_chosen_backbone(write: Write, minimal: str, install_gpus: InstallGpus):
    path = write(minimal + "  trainer_common: {ray_address: auto}\n")
    loaded = load_config(path)
    assert (loaded.backbone.name, loaded.config.astuner.backbone) == ("local", "auto")
    assert loaded.notices == ("not used by local: astuner.trainer_common.ray_address",)
    install_gpus(2)
    loaded = load_config(path)
    assert (loaded.backbone.name, loaded.notices) == ("trinity", ())


def test_the_record_has_the_chosen_backbone_and_a_dumped_job_keeps_auto(tmp_path: Path, install_gpus: InstallGpus):
    job = AstunerJob(model="m", rollout__agentscope_workflow="flow->Flow")
    assert "backbone: auto" in job.dump_job_as_yaml(tmp_path / "job.yaml", full=True).read_text()
    assert AstunerJob().load_job_from_yaml(tmp_path / "job.yaml") == job
    assert "backbone: local" in to_yaml(resolve_names(job.config, Path("run.yaml")))
    install_gpus(2)
    assert "backbone: trinity" in to_yaml(resolve_names(job.config, Path("run.yaml")))


@pytest.mark.parametrize("words", [["n_gpus_per_node=8"], ["nnodes=2"], ["n_gpus_per_node=2", "nnodes=2"]])
def test_local_rejects_several_gpus(words: list[str], write: Write, minimal: str, install_gpus: InstallGpus):
    install_gpus(8)
    overrides = [f"astuner.trainer_common.{word}" for word in words]
    with pytest.raises(ConfigError, match=r"command line: .*--backbone=local trains on one device; remove both keys"):
        load_config(write(minimal), overrides, "local")


@pytest.mark.parametrize(
    ("gpus", "asked", "fix"),
    [
        (0, 2, "this machine has no GPU; use the backbone local and remove the key"),
        (1, 2, "this machine has 1 GPU; use the backbone local and remove the key"),
        (4, 8, "this machine has 4 GPUs; write 4 or less"),
        (0, 1, ""),
        (4, 4, ""),
    ],
)
def test_trinity_needs_the_gpus_that_it_is_asked_for(gpus: int, asked: int, fix: str, install_gpus: InstallGpus):
    install_gpus(gpus)
    values = {"astuner.backbone": "trinity", "astuner.trainer_common.n_gpus_per_node": asked}
    run = with_values(RunConfig(), values).astuner
    if fix:
        with pytest.raises(ConfigError, match=fix):
            check_gpus(run)
        check_gpus(run, ["ray-cluster"])
        check_gpus(run.model_copy(update={"backbone": "verl"}))
        address = {"astuner.trainer_common.ray_address": "head:6379"}
        check_gpus(with_values(RunConfig(), values | address).astuner)
    else:
        check_gpus(run)


def test_a_job_for_missing_gpus_fails_before_anything_is_installed():
    job = AstunerJob(n_gpu=8, algorithm="grpo", model="some/model").set_workflow("agent->Agent")
    with pytest.raises(ConfigError, match=r"is 8, and this machine has no GPU; use the backbone local"):
        job.tune()


def test_a_missing_environment_names_both_ways_out(write: Write, minimal: str, install_gpus: InstallGpus):
    install_gpus(2)
    arguments = ["check", "--conf", str(write(minimal))]
    with pytest.raises(InstallError) as here:
        CliRunner().invoke(astuner, arguments, catch_exceptions=False, standalone_mode=False)
    assert "astuner install trinity" in str(here.value)
    assert "because this machine has 2 GPUs" in str(here.value)
    assert str(here.value).count("--backbone=local") == 1
    with pytest.raises(InstallError) as asked:
        CliRunner().invoke(
            astuner,
            [*arguments, "astuner.trainer_common.n_gpus_per_node=2"],
            catch_exceptions=False,
            standalone_mode=False,
        )
    assert "--backbone=local astuner.trainer_common.n_gpus_per_node=1" in str(asked.value)


def test_the_command_that_the_message_names_is_accepted(write: Write, minimal: str, install_gpus: InstallGpus):
    install_gpus(2)
    path = write(minimal + "  trainer_common: {n_gpus_per_node: 2, nnodes: 2}\n")
    *_, words = load_config(path).backbone.alternative.partition("use ")
    option, *overrides = words.split()
    assert load_config(path, overrides, option.removeprefix("--backbone=")).backbone.name == "local"
