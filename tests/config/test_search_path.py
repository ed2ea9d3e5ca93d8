"""The folders in which the files of `defaults` lists are looked up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from astuner.config.loading import load_config
from astuner.errors import ConfigError

Write = Callable[..., Path]
SIZES = {"parts/sizes": "astuner: {data: {train_batch_size: 3}}\n"}


@pytest.mark.parametrize(
    "entry", ["file://parts", "parts", "file://{here}/parts", "file://${{oc.env:ASTUNER_TEST_HERE}}/parts"]
)
def test_folders_of_the_user(
    write: Write, minimal: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: str
) -> None:
    monkeypatch.setenv("ASTUNER_TEST_HERE", str(tmp_path))
    text = minimal + f"hydra:\n  searchpath: ['{entry.format(here=tmp_path)}']\ndefaults: [sizes, _self_]\n"
    assert load_config(write(text, SIZES)).config.astuner.data.train_batch_size == 3


def test_folders_relative_to_the_working_directory(
    write: Write, minimal: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = minimal + "hydra:\n  searchpath: [file://parts]\ndefaults: [sizes, _self_]\n"
    path = write(text)
    write("", {"work/parts/sizes": SIZES["parts/sizes"]})
    path.write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path / "work")
    assert load_config(path).config.astuner.data.train_batch_size == 3


def test_names_with_spaces_quotes_and_dots(tmp_path: Path, minimal: str) -> None:
    folder = tmp_path / "it's [a] folder, with = signs"
    folder.mkdir()
    path = folder / "math@v1.5 final.yaml"
    path.write_text(minimal + "defaults: [base.v1, _self_]\n", encoding="utf-8")
    (folder / "base.v1.yaml").write_text("astuner: {data: {train_batch_size: 3}}\n", encoding="utf-8")
    assert load_config(path).config.astuner.data.train_batch_size == 3


def test_yml_files_are_found_too(tmp_path: Path, minimal: str) -> None:
    path = tmp_path / "run.yml"
    path.write_text(minimal + "defaults: [base, _self_]\n", encoding="utf-8")
    (tmp_path / "base.yml").write_text("astuner: {data: {train_batch_size: 3}}\n", encoding="utf-8")
    assert load_config(path).config.astuner.data.train_batch_size == 3


@pytest.mark.parametrize(
    ("hydra", "message"),
    [
        (
            "{searchpath: [file://nowhere]}",
            r":5: hydra.searchpath entry 'file://nowhere' is not a folder: there is no .*nowhere",
        ),
        ("{searchpath: ['pkg://some.package']}", ":5: .*'pkg://some.package': only file:// folders are supported"),
        ("{searchpath: file://parts}", ":5: hydra.searchpath is 'file://parts'; expected a list"),
        ("{searchpath: ['${oc.env:ASTUNER_NOT_SET}']}", ":5: hydra.searchpath: Environment variable"),
        ("{run: {dir: x}}", ":5: hydra.run has no effect; remove it"),
    ],
)
def test_a_wrong_hydra_section_is_reported(write: Write, minimal: str, hydra: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(write(minimal + f"hydra: {hydra}\n", SIZES))


def test_an_included_file_may_repeat_the_boilerplate_but_no_folder_of_its_own(write: Write, minimal: str) -> None:
    text = minimal + "defaults: [base, _self_]\n"
    shipped = "hydra: {searchpath: [file://astuner/default_config]}\n"
    assert load_config(write(text, {"base": shipped})).config.astuner.model.path == "some/model"
    path = write(text, {"base": "astuner: {}\nhydra: {searchpath: [file://parts]}\n"})
    with pytest.raises(ConfigError, match=r"base\.yaml:2: hydra.searchpath has an effect only in .* \(run\.yaml\)"):
        load_config(path)
