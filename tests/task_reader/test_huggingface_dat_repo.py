"""`task_reader.type: huggingface_dat_repo`, on local folders and without a network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from astuner.config.data import TaskReaderConfig
from astuner.errors import ConfigError, TaskDataError
from astuner.schema import TaskSet
from astuner.task_reader import read_tasks

CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
- config_name: socratic
  data_files:
  - {split: train, path: socratic/train-*}
---
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    had_bars = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()  # of the writing of test data
    yield
    if had_bars:
        datasets.enable_progress_bars()


def table(*questions: str) -> Any:
    import datasets

    return datasets.Dataset.from_list([{"question": q, "answer": f"so {q}\n#### 72"} for q in questions])


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """A local copy of a data set in hub layout, with two subsets."""
    folder = tmp_path / "data" / "gsm8k"
    for subset, split, questions in (
        ("main", "train", ("a?", "b?", "c?")),
        ("main", "test", ("d?",)),
        ("socratic", "train", ("e?",)),
    ):
        (folder / subset).mkdir(parents=True, exist_ok=True)
        table(*questions).to_parquet(folder / subset / f"{split}-00000-of-00001.parquet")
    (folder / "README.md").write_text(CARD)
    return folder


def read(path: Path | str, base_dir: Path = Path("/nowhere"), **section: Any) -> TaskSet:
    section = {"dataset_path": str(path), "validation_split": "test", **section}
    config = TaskReaderConfig.model_validate({"type": "huggingface_dat_repo", "huggingface_dat_repo": section})
    return read_tasks(config, base_dir=base_dir, search=[])


def questions(tasks: TaskSet) -> tuple[list[str], list[str]]:
    return [t.main_query for t in tasks.training], [t.main_query for t in tasks.validation]


def test_a_folder_in_hub_layout(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = (["a?", "b?", "c?"], ["d?"])
    tasks = read(repo, dataset_name="main")
    assert questions(tasks) == both
    assert tasks.training[0].metadata == {"question": "a?", "answer": "so a?\n#### 72"}
    assert questions(read("gsm8k", repo.parent, dataset_name="main")) == both
    assert questions(read("gsm8k/main", repo.parent)) == both
    monkeypatch.chdir(repo.parent.parent)
    assert questions(read("data/gsm8k", dataset_name="socratic", validation_split=None)) == (["e?"], [])
    assert questions(read("data/gsm8k/main", training_split="train[:2]", validation_split="train[2:]")) == (
        ["a?", "b?"],
        ["c?"],
    )


def test_subset_without_a_folder(repo: Path) -> None:
    (repo / "socratic").rename(repo / "elsewhere")
    (repo / "README.md").write_text(CARD.replace("socratic/", "elsewhere/"))
    assert questions(read(f"{repo}/socratic", validation_split=None)) == (["e?"], [])


def test_folders_of_save_to_disk(tmp_path: Path) -> None:
    import datasets

    datasets.DatasetDict(train=table("a?"), test=table("b?")).save_to_disk(tmp_path / "both")
    assert questions(read(tmp_path / "both")) == (["a?"], ["b?"])
    table("a?").save_to_disk(tmp_path / "one")
    assert questions(read(tmp_path / "one", validation_split=None)) == (["a?"], [])
    with pytest.raises(TaskDataError, match=r"no validation split 'test': Unknown split 'test'.*\['train'\]"):
        read(tmp_path / "one")
    with pytest.raises(TaskDataError, match="has no subsets"):
        read(tmp_path / "one", dataset_name="main")


def test_wrong_subset_or_split(repo: Path) -> None:
    with pytest.raises(TaskDataError, match=r"'mian' not found. Available: \['main', 'socratic'\]"):
        read(repo, dataset_name="mian")
    (repo / "README.md").write_text(CARD.replace("config_name: main", "config_name: plain"))
    with pytest.raises(TaskDataError, match=r"Please pick one among the available configs: \['plain', 'socratic'\]"):
        read(repo)
    (repo / "README.md").write_text(CARD)
    assert questions(read(repo)) == (["a?", "b?", "c?"], ["d?"])  # main, if it exists
    with pytest.raises(TaskDataError, match=r"split tarin: Unknown split \"tarin\". Should be one of"):
        read(repo, dataset_name="main", training_split="tarin")
    with pytest.raises(TaskDataError) as caught:
        read(repo, dataset_name="main", validation_split="validation")
    assert "no validation split 'validation': Unknown split" in str(caught.value)
    assert "['train', 'test']" in str(caught.value)
    assert "huggingface_dat_repo.validation_split to an existing split, or to null" in str(caught.value)


@pytest.mark.parametrize(
    ("path", "name", "tried"),
    [
        ("gsm8k", None, ["gsm8k, split"]),
        ("gsm8k", "main", ["gsm8k (subset main), split"]),
        ("gsm8k/main", None, ["gsm8k/main, split", "gsm8k (subset main), split"]),
        ("openai/gsm8k", "main", ["openai/gsm8k (subset main), split"]),
        ("openai/gsm8k/main", None, ["openai/gsm8k (subset main), split"]),
    ],
)
def test_unreachable_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, name: str | None, tried: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TaskDataError) as caught:
        read(path, dataset_name=name)
    head, *reasons, hint = str(caught.value).splitlines()
    assert f"dataset_path {path!r} cannot be read" in head
    assert [reason.strip().startswith(start) for reason, start in zip(reasons, tried, strict=True)] == [True] * len(
        tried
    )
    assert "offline, set dataset_path to a local folder" in hint


def test_cached_data_set_is_read_offline(repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`gsm8k/main` is first interpreted as a hub name, which fails, and then as a hub name and a subset."""
    import datasets

    datasets.load_dataset(str(repo), "main")  # cached under the name `gsm8k`, as if it came from the hub
    repo.rename(tmp_path / "away")
    monkeypatch.chdir(tmp_path)
    assert questions(read("gsm8k/main")) == (["a?", "b?", "c?"], ["d?"])


def test_no_such_folder(repo: Path) -> None:
    with pytest.raises(TaskDataError, match=r"no folder .*/gsm9k\. Did you mean gsm8k\?"):
        read(repo.with_name("gsm9k"), dataset_name="main")
    with pytest.raises(TaskDataError, match=r"is a file; use task_reader\.type dataset_file"):
        read(repo / "README.md")
    with pytest.raises(ConfigError, match="names the subset 'main' and dataset_name 'socratic'"):
        read("openai/gsm8k/main", dataset_name="socratic")


def test_bad_rows_and_mapping(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_list([{"text": "a?", "n": 1}, {"text": "", "n": 2}]).save_to_disk(tmp_path / "one")
    section = {"validation_split": None, "fields": {"main_query": "text", "task_id": "n"}}
    with pytest.raises(
        TaskDataError, match=r"one \[train\]: 1 of 2 rows cannot be read:\n  row 2: field 'text' is empty"
    ):
        read(tmp_path / "one", **section)
    tasks = read(tmp_path / "one", **section, skip_bad_rows=True)
    assert [(t.task_id, t.main_query, tasks.skipped_rows) for t in tasks.training] == [("1", "a?", 1)]
