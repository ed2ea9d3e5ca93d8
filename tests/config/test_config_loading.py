"""Whole configurations: the spec's own files, several files, the command line, notices, names."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from astuner.config.data import EnvServiceConfig
from astuner.config.loading import check_config, load_config, resolve_names
from astuner.config.root import RunConfig
from astuner.config.yaml_file import SHIPPED_FOLDER
from astuner.errors import ConfigError

Write = Callable[..., Path]
DATA = Path(__file__).parent / "data"
BOILERPLATE = """\
hydra:
  searchpath:
    - file://{package}/default_config
    - file://{package}/default_config/verl         # verl only
    - file://{package}/default_config/trinity      # trinity only
defaults:
  - verl_default # verl inherit 1/1
  - trinity_default # trinity inherit 1/1
  - {package_default}
  - _self_
"""


@pytest.mark.parametrize("default", ["astuner_default", "astune_default"])
@pytest.mark.parametrize("start", ["yaml folder", "elsewhere", "package"])
def test_boilerplate_of_the_spec_works_from_any_folder(
    write: Write, minimal: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, default: str, start: str
) -> None:
    path = write(minimal + BOILERPLATE.format(package="astuner", package_default=default))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    package = Path(sys.modules["astuner"].__file__ or "").parent.parent
    monkeypatch.chdir({"yaml folder": tmp_path, "elsewhere": elsewhere, "package": package}[start])
    loaded = load_config(path)
    assert loaded.config.astuner.model.path == "some/model"
    assert loaded.config.astuner.rollout.num_repeat == 4
    assert loaded.notices == ()
    assert loaded.path == path


def test_a_relative_path_is_relative_to_the_working_directory(
    write: Write, minimal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(minimal + "  rubbish: 1\n")
    monkeypatch.chdir(path.parent)
    with pytest.raises(ConfigError, match=r"^run\.yaml:5: unknown key 'astuner\.rubbish'"):
        load_config(Path("run.yaml"))


def test_a_file_with_only_the_astuner_section_has_all_defaults(write: Write, minimal: str) -> None:
    expected = {"astuner": {"model": {"path": "some/model"}, "rollout": {"agentscope_workflow": "flow->Flow"}}}
    assert load_config(write(minimal)).config == RunConfig.model_validate(expected)


def test_the_appendix_of_spec_3_names_an_environment() -> None:
    reader = load_config(DATA / "spec3_appendix.yaml").config.astuner.task_reader
    assert reader.type == "env_service"
    expected = EnvServiceConfig(
        env_type="appworld",
        env_url="http://127.0.0.1:8080",
        env_action_preference="code",
        training_split="train",
        validation_split="dev",
    )
    assert reader.env_service == expected


def test_the_appendix_of_spec_3_loads_with_another_reader() -> None:
    overrides = ["astuner.task_reader.type=dataset_file"]
    loaded = load_config(DATA / "spec3_appendix.yaml", overrides)
    run = loaded.config.astuner
    assert run.backbone == "debug"
    assert run.rollout.agentscope_workflow == "tutorial.example_appworld.appworld->ExampleAgentScopeLearnProtocol"
    assert run.task_judge.judge_type == "customized_protocol"
    assert run.task_judge.judge_protocol == "astuner.task_judge.env_service_as_judge->EnvServiceJudge"
    assert run.trainer_common.logger == ["console", "wandb"]
    assert run.trainer_common.optim.lr == 1e-6
    message = [notice.split(": ", 1)[1] for notice in loaded.notices]
    assert message == [
        "astuner.rollout.agentscope_learn_protocol is read as astuner.rollout.agentscope_workflow; "
        "write astuner.rollout.agentscope_workflow",
        "astuner.task_judge.judge_type: 'customized_protocal' is read as 'customized_protocol'; "
        "write 'customized_protocol'",
        "astuner.execute_test is accepted for older files and has no effect",
        "astuner.execute_testing_lambda is accepted for older files and has no effect",
        "astuner.task_reader.env_service.validation_split",
        "astuner.task_judge.alien_llm_model, astuner.task_judge.alien_llm_response_length",
        "astuner.task_judge.rubrics_auto_grader.dataset_file.training.file_path",
        "astuner.context_tracker.context_tracker_type, astuner.context_tracker.alien_llm_model, "
        "astuner.context_tracker.alien_llm_response_length, astuner.context_tracker.max_env_len",
        "astuner.trainer_common.n_gpus_per_node, astuner.trainer_common.logger",
    ]


@pytest.mark.parametrize(
    ("backbone", "set_aside"),
    [
        ("trinity", "no effect where a Tinker server samples and trains, as for trinity with adapters or fewer "
         "than two GPUs: astuner.rollout.max_num_seqs, astuner.trainer_common.max_tokens_per_micro_batch"),
        ("local", "not used by local: trinity"),
        ("verl", "not used by verl: trinity"),
        ("debug", "not used by debug: astuner.rollout.max_env_worker, astuner.trainer_common.save_freq, "
         "astuner.trainer_common.test_freq, astuner.trainer_common.total_epochs, trinity"),
    ],
)  # fmt: skip
def test_the_yaml_of_spec_2_loads_for_every_backbone(backbone: str, set_aside: str) -> None:
    loaded = load_config(DATA / "spec2_math_agent.yaml", backbone=backbone)
    assert loaded.config.astuner.backbone == backbone
    assert loaded.config.astuner.rollout.n_vllm_engine == 2
    assert loaded.config.astuner.data.train_batch_size == 264
    on_trinity = backbone == "trinity"
    assert loaded.config.astuner.trainer_common.max_tokens_per_micro_batch == (13000 if on_trinity else 16384)
    assert "trinity_only__n_vllm_engine is read as astuner.rollout.n_vllm_engine" in loaded.notices[0]
    taken = "max_token_len_per_gpu is read as astuner.trainer_common.max_tokens_per_micro_batch"
    assert sum(taken in notice for notice in loaded.notices) == on_trinity
    assert list(loaded.notices[1 + on_trinity :]) == [set_aside]


def test_a_base_file_is_merged_below_the_file_that_names_it(write: Write, minimal: str) -> None:
    base = "astuner:\n  data: {train_batch_size: 8, max_prompt_length: 100}\n" + BOILERPLATE.format(
        package="astuner", package_default="astuner_default"
    )
    text = minimal + "  data: {train_batch_size: 16}\ndefaults: [base, _self_]\n"
    data = load_config(write(text, {"base": base})).config.astuner.data
    assert (data.train_batch_size, data.max_prompt_length, data.max_response_length) == (16, 100, 15000)


def test_a_bare_algorithm_in_a_base_file_keeps_what_another_layer_adds(write: Write, minimal: str) -> None:
    base = "astuner:\n  trainer_common: {algorithm: dapo}\n"
    text = minimal + "  trainer_common: {algorithm: {clip_ratio_high: 0.28}}\ndefaults: [base, _self_]\n"
    algorithm = load_config(write(text, {"base": base})).config.astuner.trainer_common.algorithm
    assert (algorithm.adv_estimator, algorithm.clip_ratio_high) == ("dapo", 0.28)


def test_group_files_are_chosen_in_the_file_and_on_the_command_line(write: Write, minimal: str) -> None:
    sizes = {
        "size/small": "# @package astuner.data\ntrain_batch_size: 2\n",
        "size/large": "# @package astuner.data\ntrain_batch_size: 512\n",
    }
    path = write(minimal + "defaults:\n  - size: small\n  - _self_\n", sizes)
    assert load_config(path).config.astuner.data.train_batch_size == 2
    assert load_config(path, ["size=large"]).config.astuner.data.train_batch_size == 512


def test_references_and_environment_are_resolved(write: Write, minimal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASTUNER_TEST_PROJECT", "from-env")
    text = minimal + (
        "  project_name: ${oc.env:ASTUNER_TEST_PROJECT}\n"
        "  data: {train_batch_size: 7, max_prompt_length: '${.train_batch_size}'}\n"
        "  trainer_common: {total_epochs: '${astuner.rollout.num_repeat}'}\n"
    )
    run = load_config(write(text)).config.astuner
    assert run.project_name == "from-env"
    assert run.data.max_prompt_length == 7
    assert run.trainer_common.total_epochs == 4


def test_a_number_without_a_dot_is_a_number(write: Write, minimal: str) -> None:
    path = write(minimal + "  trainer_common: {optim: {lr: 1e-6}}\n")
    assert load_config(path).config.astuner.trainer_common.optim.lr == 1e-6
    assert load_config(path, ["astuner.trainer_common.optim.lr=5e-5"]).config.astuner.trainer_common.optim.lr == 5e-5


def test_sections_with_nothing_under_them_are_defaults(write: Write, minimal: str) -> None:
    text = minimal + "  data:\n    # train_batch_size: 3\nverl:\n"
    assert load_config(write(text)).config == load_config(write(minimal)).config


def test_all_problems_are_reported_at_once_with_file_and_line(write: Write, minimal: str) -> None:
    text = minimal + (
        "    num_repeats: 8\n"
        "    temperature: -1\n"
        "  trainer_common:\n"
        "    algorithm: {task_norm_patch: True}\n"
        "    mini_batch_num: 1000\n"  # not judged while num_repeat is in doubt
        "    optim: {lr: fast}\n"
        "defaults: [base, _self_]\n"
    )
    path = write(text, {"base": "\nastuner:\n  rolout: {num_repeat: 3}\n"})
    with pytest.raises(ConfigError) as raised:
        load_config(path, ["astuner.data.train_batch_sise=4", "astuner.rollout.top_k=0"])
    base = path.parent / "base.yaml"
    assert str(raised.value).splitlines() == [
        "7 problems in the configuration:",
        f"  {base}:3: unknown key 'astuner.rolout'; did you mean 'astuner.rollout'?",
        f"  {path}:5: unknown key 'astuner.rollout.num_repeats'; did you mean 'astuner.rollout.num_repeat'?",
        "  command line: unknown key 'astuner.data.train_batch_sise'; did you mean 'astuner.data.train_batch_size'?",
        f"  {path}:6: astuner.rollout.temperature is -1; expected a number of at least 0",
        "  command line: astuner.rollout.top_k is 0; expected -1 (all) or a number of at least 1",
        f"  {path}:10: astuner.trainer_common.optim.lr is 'fast'; expected a number",
        f"  {path}:8: astuner.trainer_common.algorithm.task_norm_patch is True, which --backbone=local does not "
        "support: it is no longer supported; norm_adv_by_std sets whether advantages are divided by the group's "
        "standard deviation",
    ]


def test_backbone_argument_goes_before_file_and_command_line(write: Write, minimal: str) -> None:
    path = write(minimal + "  backbone: verl\n")
    assert load_config(path, ["astuner.backbone=trinity"], backbone="debug").config.astuner.backbone == "debug"
    with pytest.raises(ConfigError, match=r"^--backbone: astuner.backbone is 'vrel'; .*did you mean 'verl'\?$"):
        load_config(path, backbone="vrel")


def test_each_notice_is_given_once(write: Write, minimal: str) -> None:
    older = "astuner:\n  rollout: {agentscope_learn_protocol: a->B}\n"
    text = older + "  model: {path: m}\ndefaults: [base, _self_]\n"
    path = write(text, {"base": older})
    notices = load_config(path, ["astuner.rollout.agentscope_learn_protocol=c->D"]).notices
    assert len(notices) == 1
    assert notices[0].startswith("command line: astuner.rollout.agentscope_learn_protocol is read as")


def test_names_follow_the_file_and_the_folder_of_experiments(write: Write, minimal: str) -> None:
    config = load_config(write(minimal)).config
    run = resolve_names(config, Path("some/where/math.v2.yaml")).astuner
    assert (run.experiment_name, run.experiment_dir) == ("math.v2", "launcher_record/math.v2")
    run = resolve_names(config, Path("math.yaml"), exp_dir="/runs").astuner
    assert run.experiment_dir == "/runs/math"


def test_names_that_were_given_stay(write: Write, minimal: str) -> None:
    config = load_config(write(minimal + "  experiment_name: mine\n  experiment_dir: /data/x\n")).config
    resolved = resolve_names(config, Path("math.yaml"))
    assert (resolved.astuner.experiment_name, resolved.astuner.experiment_dir) == ("mine", "/data/x")
    assert resolve_names(resolved, Path("other.yaml")) == resolved


def test_a_configuration_made_in_python_is_checked_alike() -> None:
    run = {"model": {"path": "m"}, "rollout": {"agentscope_workflow": "a->B"}}
    run["trainer_common"] = {"ray_address": "auto"}
    assert check_config(RunConfig.model_validate({"astuner": run})) == (
        "not used by local: astuner.trainer_common.ray_address",
    )
    with pytest.raises(ConfigError, match="the model to train is missing"):
        check_config(RunConfig())


def test_a_callers_own_hydra_is_left_as_it_was(write: Write, minimal: str, tmp_path: Path) -> None:
    path = write(minimal, {"other": "x: 1\n"})
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        load_config(path)
        assert compose("other") == {"x": 1}
    assert not GlobalHydra.instance().is_initialized()


def test_loading_is_light(write: Write, minimal: str) -> None:
    script = (
        "import sys\n"
        "from pathlib import Path; from astuner.config.loading import load_config\n"
        "load_config(Path(sys.argv[1]))\n"
        "print(*{'torch', 'transformers', 'datasets', 'agentscope', 'ray'} & set(sys.modules))"
    )
    path = write(minimal + BOILERPLATE.format(package="astuner", package_default="astuner_default"))
    run = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
    assert run.stdout.split() == []


def test_the_shipped_defaults_are_values_that_every_yaml_reader_reads_alike():
    """They are read with libyaml, and the files of the user as OmegaConf reads YAML, which knows more numbers."""
    for path in SHIPPED_FOLDER.rglob("*.yaml"):
        expected = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        assert yaml.safe_load(path.read_text()) == expected
