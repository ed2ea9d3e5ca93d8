"""`defaults` lists: how files are found and merged, and the errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from astuner.config.composition import compose_files
from astuner.config.loading import load_config
from astuner.config.validation import origin_of
from astuner.errors import ConfigError

Write = Callable[..., Path]


def test_the_last_place_that_set_a_key_is_its_origin(write: Write, minimal: str) -> None:
    base = "astuner:\n  data:\n    train_batch_size: 1\n    max_prompt_length: 2\n    shuffle: false\n"
    size = "# @package astuner.data\nmax_prompt_length: 4\n"
    text = minimal + "  data: {train_batch_size: 3}\ndefaults: [base, size/four, _self_]\n"
    path = write(text, {"base": base, "size/four": size})
    composed = compose_files(path, ["astuner.rollout.top_p=0.5", "~astuner.data.shuffle"])
    here = path.parent
    assert composed.tree["astuner"]["data"] == {
        "train_batch_size": 3,
        "max_prompt_length": 4,
        "max_response_length": 15000,
    }
    assert composed.origins[("astuner", "data", "train_batch_size")] == f"{path}:5"
    assert composed.origins[("astuner", "data", "max_prompt_length")] == f"{here}/size/four.yaml:2"
    assert composed.origins[("astuner", "rollout", "top_p")] == "command line"
    assert ("astuner", "data", "shuffle") not in composed.origins
    assert origin_of(composed.origins, ("astuner", "data", "shuffle")) == f"{path}:5"
    assert origin_of(composed.origins, ("trinity",)) == ""


def test_all_shipped_defaults_are_below_every_file(write: Write, minimal: str) -> None:
    composed = compose_files(write(minimal), [])
    assert composed.tree.keys() == {"astuner", "verl", "trinity"}
    assert set(composed.origins.values()) == {f"{write(minimal)}:{line}" for line in (1, 2, 3, 4)}


def test_files_are_merged_in_the_order_of_the_list(write: Write, minimal: str) -> None:
    files = {name: f"astuner: {{data: {{train_batch_size: {size}}}}}\n" for name, size in (("a", 1), ("b", 2))}
    for names, expected in (("a, b, _self_", 2), ("b, a, _self_", 1), ("a, b", 2), ("_self_, a", 1)):
        path = write(minimal + f"  data: {{max_prompt_length: 9}}\ndefaults: [{names}]\n", files)
        data = load_config(path).config.astuner.data
        assert (data.train_batch_size, data.max_prompt_length) == (expected, 9)


def test_an_unknown_key_in_a_packaged_file_has_its_full_name(write: Write, minimal: str) -> None:
    files = {"size/four": "# @package astuner.data\ntrain_batch_sizes: 4\n"}
    with pytest.raises(ConfigError, match=r"four\.yaml:2: unknown key 'astuner\.data\.train_batch_sizes'"):
        load_config(write(minimal + "defaults: [size/four, _self_]\n", files))


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        ("[bas, _self_]", r"run\.yaml:5: defaults: there is no bas\.yaml in \S+; did you mean 'base'\?"),
        ("\n  - base\n  - size: large\n", r"run\.yaml:7: defaults: there is no size/large\.yaml in"),
        ("base", r"run\.yaml:5: defaults is 'base'; expected a list"),
        ("[3]", r"run\.yaml:5: defaults entry 3; expected a file name"),
        ("\n  - override size: small\n", r"run\.yaml: In 'run\.yaml': Could not override 'size'"),
        ("[circle]", r"run\.yaml: the files of its defaults lists name each other in a circle"),
        ("[own/astuner_default]", r"run\.yaml:5: defaults: there is no own/astuner_default\.yaml"),
    ],
)
def test_a_wrong_defaults_list_is_reported(write: Write, minimal: str, defaults: str, message: str) -> None:
    files = {
        "base": "astuner: {}",
        "size/small": "",
        "circle": "defaults: [circle_back]",
        "circle_back": "defaults: [circle]",
    }
    with pytest.raises(ConfigError, match=message):
        load_config(write(minimal + f"defaults: {defaults}\n", files))


def test_a_group_option_that_is_not_there_is_reported(write: Write, minimal: str) -> None:
    path = write(minimal + "defaults: [size: small, _self_]\n", {"size/small": ""})
    with pytest.raises(ConfigError, match=r"there is no size/large\.yaml"):
        load_config(path, ["size=large"])


def test_a_syntax_error_in_an_included_file_names_that_file(write: Write, minimal: str) -> None:
    path = write(minimal + "defaults: [base, _self_]\n", {"base": "astuner: {\n"})
    with pytest.raises(ConfigError, match=r"base\.yaml:2, column 1: not valid YAML"):
        load_config(path)


def test_a_users_file_with_the_name_of_a_shipped_default_is_rejected(write: Write, minimal: str) -> None:
    path = write(minimal + "defaults: [astuner_default, _self_]\n", {"astuner_default": ""})
    with pytest.raises(ConfigError, match=r"astuner_default\.yaml has the name of a default that astuner ships"):
        load_config(path)


def test_a_key_that_is_a_number_is_unknown_like_any_other(write: Write, minimal: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.yaml:5: unknown key 'astuner\.1'"):
        load_config(write(minimal + "  1: ${nowhere}\n"))


def test_every_reference_that_leads_nowhere_is_reported(write: Write, minimal: str) -> None:
    path = write(
        minimal + "  project_name: ${oc.env:ASTUNER_NOT_SET}\n  data:\n    train_batch_size: ${astuner.nope}\n"
    )
    with pytest.raises(ConfigError) as raised:
        load_config(path)
    assert str(raised.value).splitlines()[1:] == [
        f"  {path}:5: astuner.project_name: Environment variable 'ASTUNER_NOT_SET' not found",
        f"  {path}:7: astuner.data.train_batch_size: Interpolation key 'astuner.nope' not found",
    ]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("  rollout: []", r"run\.yaml:2: astuner\.rollout is \[\]; expected a section with keys below it$"),
        (
            "  trainer_common: {logger: {}}",
            r"run\.yaml:2: astuner\.trainer_common\.logger is \{\}; "
            r"expected a list of console, tensorboard, wandb, swanlab, trackio$",
        ),
        ("  services: [a]", r"run\.yaml:2: astuner\.services is \['a'\]; expected a mapping$"),
        ("trinity: [1]", r"run\.yaml:2: trinity is \[1\]; expected a mapping$"),
    ],
)
def test_a_list_in_place_of_a_mapping_has_its_line(write: Write, line: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_config(write(f"astuner:\n{line}\n"))


def test_a_list_in_place_of_a_mapping_in_a_packaged_file_has_its_line(write: Write, minimal: str) -> None:
    path = write(
        minimal + "defaults: [size/four, _self_]\n", {"size/four": "# @package astuner.rollout\nval_kwargs: [1]\n"}
    )
    with pytest.raises(
        ConfigError, match=r"size/four\.yaml:2: astuner\.rollout\.val_kwargs is \[1\]; expected a section"
    ):
        load_config(path)
