"""Encoding of updates in an episode's file."""

from __future__ import annotations

import json
from array import array
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astuner.errors import RecordError
from astuner.run_record import by_token, entropy_by_token, read_recorded_episode
from astuner.run_record.episode_file import EpisodeLabels, add_update, episode_to_json
from astuner.run_record.updates import SampleUpdate, call_advantages, decode_update, encode_update
from astuner.schema import CallSpan, Episode, Sample, Task

FLOAT32 = st.floats(allow_nan=False, width=32)
SAMPLE = Sample(
    (5, 6, 7, 8, 9), (0, 1, 2, 0, 1), (0.0, -1.0, -2.0, 0.0, -3.0), (0, 1, 2, 3, 4), 1.0,
    (CallSpan("a", 1, 3), CallSpan("b", 4, 5)),
)  # fmt: skip
UPDATE = SampleUpdate(((2, 0.5), (1, -1.0)), (-1.5, -2.5, -3.5), (0.5, 1.5, 0.25))


@given(st.lists(FLOAT32, max_size=30), st.integers(0, 5))
def test_updates_survive_a_round_trip(logprobs: list[float], context: int):
    mask = (0,) * context + (1,) * len(logprobs)
    sample = replace(SAMPLE, token_ids=mask, train_counts=mask, spans=())
    update = SampleUpdate(((len(logprobs), 0.25),), tuple(logprobs), tuple(logprobs[::-1]))
    assert decode_update(json.loads(json.dumps(encode_update(update))), sample) == update
    bare = replace(update, logprobs=None, entropies=None)
    assert decode_update(encode_update(bare), sample) == bare


def test_values_per_token_and_per_call():
    assert by_token(SAMPLE, UPDATE) == ([None, 0.5, 0.5, None, -1.0], [None, -1.5, -2.5, None, -3.5])
    assert by_token(SAMPLE, replace(UPDATE, logprobs=None))[1] == [None] * 5
    assert entropy_by_token(SAMPLE, UPDATE) == [None, 0.5, 1.5, None, 0.25]
    assert entropy_by_token(SAMPLE, replace(UPDATE, entropies=None)) == [None] * 5
    assert call_advantages([SAMPLE], [UPDATE]) == {"a": 0.5, "b": -1.0}
    apart = replace(UPDATE, advantages=((1, 0.0), (1, 1.0), (1, 2.0)))
    assert call_advantages([SAMPLE], [apart]) == {"a": 0.5, "b": 2.0}
    assert call_advantages([SAMPLE], []) == {}


def test_values_per_call_of_a_tree_sample():
    tree = replace(SAMPLE, parents=(-1, 0, 0, 1, 2), spans=(CallSpan("a", 1, 2, (1,)), CallSpan("b", 1, 3, (2, 4))))
    apart = replace(UPDATE, advantages=((1, 2.0), (2, 1.0)))
    assert call_advantages([tree], [apart]) == {"a": 2.0, "b": 1.0}


@pytest.fixture
def written(tmp_path: Path) -> Path:
    episode = Episode("e", Task("t", "?"), 0, "ok", 1.0, True, samples=(SAMPLE,))
    path = tmp_path / "e.json"
    path.write_bytes(episode_to_json(episode, EpisodeLabels(1, "train", 0.5), lambda text: text, [UPDATE]))
    return path


def test_an_episodes_file_holds_updates(written: Path):
    assert read_recorded_episode(written).updates == (UPDATE,)
    numbers = json.loads(written.read_bytes())["updates"][0]["logprobs"]
    assert len(numbers) == len(array("f", UPDATE.logprobs or ()).tobytes()) * 4 // 3


def test_a_redacted_episode_has_no_updates(tmp_path: Path):
    episode = Episode("e", Task("t", "my secret"), 0, "ok", 1.0, True, samples=(SAMPLE,))
    path = tmp_path / "e.json"
    path.write_bytes(
        episode_to_json(episode, EpisodeLabels(1, "train"), lambda text: text.replace("secret", "…"), [UPDATE])
    )
    assert read_recorded_episode(path).updates == ()


@pytest.mark.parametrize(
    ("advantage", "updates"), [(0.5, (UPDATE,)), (None, (UPDATE,)), (-0.12345, (UPDATE,)), (0.0, ()), (-0.12345, ())]
)
def test_results_that_are_added_to_a_file_are_those_of_a_file_that_is_written_with_them(
    tmp_path: Path, advantage: float | None, updates: tuple[SampleUpdate, ...]
):
    episode = Episode("e", Task("t", 'the "advantage":'), 0, "ok", 1.0, True, (), (SAMPLE,), metadata={"advantage": 1})

    def content(label: float | None, added: tuple[SampleUpdate, ...]) -> bytes:
        return episode_to_json(episode, EpisodeLabels(1, "train", label), str, added)

    path = tmp_path / "e.json"
    untrained, trained = content(None, ()), content(advantage, updates)
    path.write_bytes(untrained)
    add_update(path, advantage, updates)
    assert path.read_bytes() == trained
    with pytest.raises(RecordError, match="changed after the run wrote it"):
        add_update(path, advantage, updates)
    # A kill while the results are written leaves the episode without them.
    for length in range(len(untrained) - 5, len(trained)):
        path.write_bytes(trained[:length] + untrained[length:])
        recorded = read_recorded_episode(path)
        assert (recorded.episode, recorded.labels.advantage, recorded.updates) == (episode, None, ())


def test_a_redacted_file_gets_no_updates(tmp_path: Path):
    episode = Episode("e", Task("t", "my secret"), 0, "ok", 1.0, True, samples=(SAMPLE,))
    path = tmp_path / "e.json"
    path.write_bytes(episode_to_json(episode, EpisodeLabels(1, "train"), lambda text: text.replace("secret", "…")))
    add_update(path, 0.5, [UPDATE])
    recorded = read_recorded_episode(path)
    assert (recorded.labels.advantage, recorded.updates) == (0.5, ())


def test_a_record_of_an_older_version_has_no_entropies(written: Path):
    document = json.loads(written.read_bytes())
    del document["updates"][0]["entropies"]
    written.write_text(json.dumps(document))
    assert read_recorded_episode(written).updates == (replace(UPDATE, entropies=None),)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logprobs", "AAAA"),
        ("entropies", "AAAA"),
        ("logprobs", "no base64!"),
        ("logprobs", 5),
        ("advantages", [[1, 0.5]]),
        ("advantages", 7),
    ],
)
def test_a_damaged_update_is_an_error(written: Path, field: str, value: object):
    document = json.loads(written.read_bytes())
    document["updates"][0][field] = value
    written.write_text(json.dumps(document))
    with pytest.raises(RecordError, match="update"):
        read_recorded_episode(written)
