"""The starting models of the examples: they are created once per recipe, and are the same again."""

from __future__ import annotations

import hashlib
import json
import random
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.conftest import conversation
from tutorial.example_math_agent import prepare_model
from tutorial.starting_model import Recipe, build_tokenizer, cache_folder, fingerprint, ship, starting_model

RECIPE = Recipe(
    "tiny",
    hidden_size=16,
    intermediate_size=32,
    layers=1,
    heads=1,
    kv_heads=1,
    head_dim=16,
    context=512,
    vocabulary=400,
    validation_transcripts=2,
    batch=2,
)


def transcripts() -> list[dict[str, Any]]:
    rng = random.Random(0)
    return [conversation(rng) for _ in range(6)]


def test_concurrent_runs_create_a_model_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls: list[int] = []

    def counted() -> list[dict[str, Any]]:
        calls.append(1)
        return transcripts()

    folder = starting_model(RECIPE, counted, ["a source"])
    assert folder.parent.parent == cache_folder()
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == ["model"]
    assert {"model.safetensors", "tokenizer.json", "config.json"} <= {path.name for path in folder.iterdir()}
    others: list[Path] = []
    threads = [
        threading.Thread(target=lambda: others.append(starting_model(RECIPE, counted, ["a source"]))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (others, len(calls)) == ([folder, folder], 1)


def test_an_unfinished_model_is_created_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def failing() -> list[dict[str, Any]]:
        raise KeyError("no transcripts")

    with pytest.raises(KeyError, match="no transcripts"):
        starting_model(RECIPE, failing, [])
    assert (starting_model(RECIPE, transcripts, []) / "model.safetensors").exists()


def test_a_pretrained_model_is_trained_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_folder: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = load_file(model_folder / "model.safetensors")
    tuned = starting_model(RECIPE, transcripts, [], lambda: model_folder)
    after = load_file(tuned / "model.safetensors")
    assert {name: weight.shape for name, weight in after.items()} == {name: w.shape for name, w in before.items()}
    assert any((after[name] != before[name]).any() for name in after)
    assert all((before[name] == weight).all() for name, weight in load_file(model_folder / "model.safetensors").items())


def test_the_fingerprint_changes_with_the_recipe_and_the_sources(tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text("a = 1")
    before = fingerprint(RECIPE, [source, "prompt"])
    assert fingerprint(RECIPE, [source, "prompt"]) == before
    assert fingerprint(replace(RECIPE, lr=1e-4), [source, "prompt"]) != before
    assert fingerprint(RECIPE, [source, "another prompt"]) != before
    source.write_text("a = 2")
    assert fingerprint(RECIPE, [source, "prompt"]) != before
    source.write_text("# A comment\na   = 1\n")
    assert fingerprint(RECIPE, [source, "prompt"]) == before
    source.write_text('"""A docstring."""\na = 1')
    assert fingerprint(RECIPE, [source, "prompt"]) == before


def test_a_shipped_model_is_used_as_long_as_its_recipe_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_folder: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shipped = tmp_path / "shipped"
    ship(model_folder, shipped, RECIPE, ["a source"])
    assert starting_model(RECIPE, transcripts, ["a source"], shipped=shipped) == shipped
    assert not (tmp_path / "cache").exists()
    before, after = load_file(model_folder / "model.safetensors"), load_file(shipped / "model.safetensors")
    assert all((before[name].bfloat16() == weight).all() for name, weight in after.items())
    assert starting_model(RECIPE, transcripts, ["another source"], shipped=shipped).is_relative_to(tmp_path / "cache")


def test_the_math_agents_shipped_model_is_that_of_its_recipe() -> None:
    """If this fails, `python -m tutorial.example_math_agent.prepare_model` makes the model again."""
    assert prepare_model.tiny_model() == prepare_model.SHIPPED


@pytest.mark.long
def test_the_math_agents_shipped_model_can_be_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processors round differently, so the weights need not be equal, but the models predict about the same."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = starting_model(prepare_model.RECIPE, prepare_model.transcripts, prepare_model.SOURCES)
    assert (made / "tokenizer.json").read_bytes() == (prepare_model.SHIPPED / "tokenizer.json").read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(made)
    held_out = prepare_model.transcripts()[: prepare_model.RECIPE.validation_transcripts]
    losses = []
    for folder in (made, prepare_model.SHIPPED):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        ids = [
            tokenizer.apply_chat_template(row["messages"], tools=row["tools"], return_dict=False) for row in held_out
        ]
        with torch.no_grad():
            losses.append([float(model(torch.tensor([row]), labels=torch.tensor([row])).loss) for row in ids])
    made_loss, shipped_loss = (sum(values) / len(values) for values in losses)
    assert abs(made_loss - shipped_loss) < 0.02, (made_loss, shipped_loss)


def test_an_isolated_pattern_makes_tokens_of_its_own() -> None:
    rows = [{"messages": [{"role": "user", "content": "12 AB 12 AB"}]}] * 20
    assert "12" in build_tokenizer(replace(RECIPE, isolated="[AB]"), rows).tokenize("12A")[0]
    assert build_tokenizer(RECIPE, rows).tokenize("12A")[:2] == ["1", "2"]
    assert build_tokenizer(replace(RECIPE, isolated="[AB]"), rows).tokenize("AB") == ["A", "B"]


def test_the_math_agents_recipe_is_the_one_of_its_published_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_model, "TRANSCRIPTS", 500)
    text = json.dumps([row["messages"] for row in prepare_model.transcripts()])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "7852022975571642"
    assert Recipe("math_agent_tiny", hidden_size=128, layers=4, seed=1, batch=16, lr=3e-3) == prepare_model.RECIPE
