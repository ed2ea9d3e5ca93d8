from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astuner.errors import RecordError
from astuner.run_record import read_episode, read_index
from astuner.run_record.episode_file import EpisodeLabels, episode_to_json
from astuner.run_record.episodes import EpisodeStore
from astuner.schema import (
    CallSpan,
    Episode,
    Fork,
    Judgement,
    LlmCall,
    OutputConstraint,
    Sample,
    SamplingParams,
    Task,
    TokenCounts,
)
from tests.examples import examples
from tests.work import calls_of

MakeEpisode = Callable[..., Episode]
TRAIN_1 = EpisodeLabels(step=1, split="train")


def without_surrogate_pairs(text: str) -> bool:
    # JSON cannot tell two surrogates in a row from the one character that they encode.
    return not any("\ud800" <= a <= "\udbff" and "\udc00" <= b <= "\udfff" for a, b in itertools.pairwise(text))


TEXT = st.text(st.characters(exclude_categories=()), max_size=12).filter(without_surrogate_pairs)
NUMBER = st.floats(allow_nan=False)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
ID = st.integers(0, 200_000)
IDS = st.lists(ID, max_size=8).map(tuple)
JSON_VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | FINITE | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
OBJECT = st.dictionaries(TEXT, JSON_VALUE, max_size=3)
MESSAGES = st.lists(OBJECT, max_size=4).map(tuple)
FORKS = st.builds(
    Fork, position=ID, expected_ids=IDS, found_ids=IDS, call_id=TEXT, expected=TEXT, found=TEXT, message_index=ID
)
CONSTRAINTS = st.builds(OutputConstraint, st.just("response_format"), TEXT, st.none() | TEXT)
SAMPLING = st.builds(
    SamplingParams,
    stop_token_ids=IDS,
    temperature=NUMBER,
    seed=st.none() | ID,
    stop=st.lists(TEXT, max_size=2).map(tuple),
    constraint=st.none() | CONSTRAINTS,
)


@st.composite
def call_lists(draw: st.DrawFn) -> tuple[LlmCall, ...]:
    """Draw calls of which some extend others, partly or completely."""
    calls: list[LlmCall] = []
    for number in range(draw(st.integers(0, 5))):
        prompt, messages = draw(IDS), draw(MESSAGES)
        if calls and draw(st.booleans()):
            base = draw(st.sampled_from(calls))
            stream = base.prompt_ids + base.completion_ids
            prompt = stream[: draw(st.integers(0, len(stream)))] + prompt
            messages = base.messages[: draw(st.integers(0, len(base.messages)))] + messages
        completion = draw(IDS)
        call = LlmCall(
            call_id=f"c{number}",
            episode_id="e",
            prompt_ids=prompt,
            completion_ids=completion,
            logprobs=tuple(draw(NUMBER) for _ in completion),
            finish_reason=draw(st.sampled_from(["stop", "length"])),
            sampling=draw(SAMPLING),
            messages=messages,
            agent_name=draw(TEXT),
            fork=draw(st.none() | FORKS),
            start_time=draw(NUMBER),
        )
        calls.append(call)
    return tuple(calls)


@st.composite
def sample_rows(draw: st.DrawFn) -> Sample:
    tokens = draw(IDS)
    count = len(tokens)
    in_order = tuple(range(count))
    return Sample(
        token_ids=tokens,
        train_counts=tuple(draw(st.integers(0, 3)) for _ in tokens),
        logprobs=tuple(draw(NUMBER) for _ in tokens),
        position_ids=draw(st.sampled_from([in_order, in_order[::-1]])),
        weight=draw(NUMBER),
        spans=tuple(draw(st.lists(st.builds(CallSpan, call_id=TEXT, start=ID, end=ID), max_size=2))),
        episode_id="e",
    )


EPISODES = st.builds(
    Episode,
    episode_id=TEXT,
    task=st.builds(Task, task_id=TEXT, main_query=TEXT, init_messages=MESSAGES, metadata=OBJECT),
    repeat_index=st.integers(0, 99),
    status=st.sampled_from(["ok", "failed", "dropped"]),
    reward=st.none() | NUMBER,
    is_success=st.none() | st.booleans(),
    calls=call_lists(),
    samples=st.lists(sample_rows(), max_size=2).map(tuple),
    error_kind=st.none() | TEXT,
    error=st.none() | TEXT,
    metadata=OBJECT,
    log_metrics=st.dictionaries(TEXT, FINITE, max_size=2),
    judgement=st.none()
    | st.builds(
        Judgement,
        reward=st.none() | NUMBER,
        is_success=st.none() | st.booleans(),
        components=st.dictionaries(TEXT, FINITE, max_size=2),
        agent_rewards=st.dictionaries(TEXT, FINITE, max_size=2),
        call_rewards=st.lists(FINITE, max_size=3).map(tuple),
        explanation=TEXT,
        unscored_cause=TEXT,
        metadata=OBJECT,
        metrics=st.dictionaries(TEXT, FINITE, max_size=2),
    ),
    start_time=NUMBER,
    end_time=NUMBER,
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[EpisodeStore]:
    store = EpisodeStore(tmp_path)
    yield store
    store.close()


@settings(max_examples=examples(80), deadline=None)
@given(episode=EPISODES, advantage=st.none() | NUMBER)
def test_every_episode_survives_a_round_trip(
    tmp_path_factory: pytest.TempPathFactory, episode: Episode, advantage: float | None
) -> None:
    folder = tmp_path_factory.mktemp("run")
    store = EpisodeStore(folder)
    path = store.write(episode, EpisodeLabels(3, "val", advantage))
    store.close()
    assert read_episode(path) == episode
    (entry,) = read_index(folder)
    assert folder / entry.path == path
    assert (entry.step, entry.split, entry.advantage) == (3, "val", advantage)
    assert (entry.task_id, entry.episode_id, entry.reward) == (episode.task.task_id, episode.episode_id, episode.reward)


def test_index_entries(store: EpisodeStore, tmp_path: Path, make_episode: MakeEpisode) -> None:
    episode = make_episode(calls=2, tokens=5)
    store.write(episode, EpisodeLabels(7, "train", -0.5, TokenCounts(raw=38, distinct=28, trained=10)))
    store.write(replace(episode, episode_id="e2", status="failed", reward=None, error_kind="judge"), TRAIN_1)
    first, second = read_index(tmp_path)
    assert (first.step, first.split, first.status, first.reward, first.is_success) == (7, "train", "ok", 1.0, True)
    assert (first.calls, first.samples, first.seconds, first.advantage) == (2, 1, 2.5, -0.5)
    assert (first.tokens_raw, first.tokens_distinct, first.tokens_trained) == (38, 28, 10)
    assert (second.status, second.reward, second.error_kind) == ("failed", None, "judge")
    # Counted from the episode where the trainer gave nothing: prompts of 10 and 18 ids, 5 sampled ids each.
    assert (second.tokens_raw, second.tokens_distinct, second.tokens_trained) == (38, None, 10)


def test_episodes_do_not_overwrite_each_other(store: EpisodeStore, tmp_path: Path, make_episode: MakeEpisode) -> None:
    count = 0
    for step, split in ((0, "val"), (1, "train"), (20, "val"), (1_000_000, "train")):
        for task_id in ("a/b", "a?b", "a b", "", "../../etc/passwd", "é" * 300, "." * 5, "x" * 300, "A_b"):
            for repeat in range(3):
                episode = make_episode(f"{step}-{split}-{task_id}-{repeat}", task_id, calls=0, repeat_index=repeat)
                path = store.write(episode, EpisodeLabels(step, split))  # type: ignore[arg-type]
                assert read_episode(path) == episode
                count += 1
    files = [path for path in (tmp_path / "episodes").rglob("*.json") if path.is_file()]
    assert len(files) == count == len(read_index(tmp_path))
    assert {path.parent.relative_to(tmp_path).as_posix() for path in files} == {
        "episodes/val/step_000000",
        "episodes/train/step_000001",
        "episodes/val/step_000020",
        "episodes/train/step_1000000",
    }
    assert all(path.name.isascii() and len(path.name) < 120 for path in files)


def test_an_episode_written_twice_replaces_itself(
    store: EpisodeStore, tmp_path: Path, make_episode: MakeEpisode
) -> None:
    store.write(make_episode(reward=0.0), TRAIN_1)
    path = store.write(make_episode(reward=1.0), TRAIN_1)
    assert [entry.reward for entry in read_index(tmp_path)] == [1.0]
    assert read_episode(path).reward == 1.0


def test_later_steps_are_removed_with_their_files(
    store: EpisodeStore, tmp_path: Path, make_episode: MakeEpisode
) -> None:
    for step in (0, 1, 2, 3):
        for split in ("train", "val"):
            store.write(make_episode(f"{step}{split}"), EpisodeLabels(step, split))  # type: ignore[arg-type]
    orphan = tmp_path / "episodes" / "train" / "step_000009" / "killed-before-its-line.json"
    orphan.parent.mkdir()
    orphan.write_text("{}")
    assert store.truncate_after(1, 1) == 4
    assert [(entry.step, entry.split) for entry in read_index(tmp_path)] == [
        (0, "train"), (0, "val"), (1, "train"), (1, "val"),
    ]  # fmt: skip
    assert len(list((tmp_path / "episodes").rglob("*.json"))) == 4
    store.write(make_episode("again"), EpisodeLabels(2, "train"))
    assert [entry.step for entry in read_index(tmp_path)][-1] == 2


def test_messages_that_differ_in_the_type_of_a_number_are_not_shared(
    store: EpisodeStore, make_episode: MakeEpisode
) -> None:
    episode = make_episode()
    first, second = episode.calls
    calls = (replace(first, messages=({"n": 1}, {"n": 1})), replace(second, messages=({"n": 1}, {"n": True})))
    back = read_episode(store.write(replace(episode, calls=calls), TRAIN_1))
    assert [repr(call.messages) for call in back.calls] == [repr(call.messages) for call in calls]


class Unprintable:
    def __str__(self) -> str:
        raise RuntimeError("no")


class Trap(Mapping[str, Any]):
    def __getitem__(self, key: str) -> Any:
        raise RuntimeError("no")

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError("no")

    def __len__(self) -> int:
        return 1


def test_values_that_json_cannot_represent_are_recorded(store: EpisodeStore, make_episode: MakeEpisode) -> None:
    endless: dict[str, Any] = {"name": "endless"}
    endless["self"] = endless
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    metadata = {
        "object": Unprintable(),
        "trap": Trap(),
        "endless": endless,
        "deep": deep,
        "set": {1},
        "huge": 10**5000,
        "nan": math.nan,
        7: "key",
        "line": "x" * 1_000_000,
        "text": "\x00\ud800\u202e</script>\n",
    }
    shown = read_episode(store.write(replace(make_episode(), metadata=metadata), TRAIN_1)).metadata
    assert shown["object"] == "<Unprintable that cannot be shown>"
    assert shown["trap"] == "<Trap that cannot be shown>"
    assert shown["endless"] == {"name": "endless", "self": "<contains itself>"}
    assert "<nested deeper than 100 levels>" in str(shown["deep"])
    assert (shown["set"], shown["huge"], shown["nan"], shown["7"]) == ("{1}", hex(10**5000), "NaN", "key")
    assert shown["line"] == "x" * 1_000_000
    assert shown["text"] == "\x00\ud800\u202e</script>\n"


def test_numbers_of_other_libraries_are_read_as_numbers(store: EpisodeStore, make_episode: MakeEpisode) -> None:
    numpy = pytest.importorskip("numpy")
    episode = make_episode()
    (first, second), (sample,) = episode.calls, episode.samples
    foreign = replace(
        episode,
        calls=(replace(first, completion_ids=tuple(map(numpy.int64, first.completion_ids))), second),
        samples=(replace(sample, logprobs=tuple(map(numpy.float32, sample.logprobs))),),
        metadata={"score": numpy.float32(0.5), "count": numpy.int64(3)},
    )
    back = read_episode(store.write(foreign, TRAIN_1))
    assert back == foreign
    assert back.metadata == {"score": 0.5, "count": 3}
    assert isinstance(back.samples[0].logprobs[0], float)


def test_file_is_strict_json_with_a_format_number(make_episode: MakeEpisode) -> None:
    episode = make_episode()
    (sample,) = episode.samples
    nowhere = replace(episode, samples=(replace(sample, logprobs=(-math.inf, *sample.logprobs[1:])),))
    labels = EpisodeLabels(4, "train", 0.25, TokenCounts(1, 2, 3))
    content = json.loads(episode_to_json(nowhere, labels, str), parse_constant=pytest.fail)
    assert {name: content[name] for name in ("format", "step", "split", "advantage", "tokens")} == {
        "format": 1, "step": 4, "split": "train", "advantage": 0.25, "tokens": {"raw": 1, "distinct": 2, "trained": 3},
    }  # fmt: skip
    (recorded,) = content["episode"]["samples"]
    assert recorded["logprobs"][0] == "-Infinity"
    # The key of `train_counts` since format 1.
    assert recorded["loss_mask"] == list(sample.train_counts)
    assert "train_counts" not in recorded


def test_space_is_linear_in_the_tokens(make_episode: MakeEpisode) -> None:
    sizes = [len(episode_to_json(make_episode(calls=calls, tokens=50), TRAIN_1, str)) for calls in (20, 80)]
    assert sizes[1] < 4.5 * sizes[0]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not a JSON file"),
        (b"\x00\xff", "not a JSON file"),
        (b"[]", "not an episode of a run record of format 1"),
        (b'{"format":2}', "not an episode of a run record of format 1"),
        (b'{"format":1}', "an incomplete episode"),
        (b'{"format":1,"episode":{"calls":[{"shared":{"call":5}}],"samples":[]}}', "an incomplete episode"),
        (b'{"format":1,"episode":{"calls":[],"samples":[]}}', "fields of Episode are missing"),
        (b'{"format":1,"episode":{"calls":[],"samples":[],"repeat_index":"x"}}', "Episode.repeat_index cannot be 'x'"),
        (b'{"format":1,"episode":{"calls":[],"samples":[],"task":3}}', "expected an object with the fields of Task"),
    ],
)
def test_errors_of_damaged_files_name_file_and_reason(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(RecordError, match=r"broken\.json.*" + reason.replace(".", r"\.")):
        read_episode(path)


def test_missing_episode_and_index_are_named(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"cannot read .*none\.json: No such file"):
        read_episode(tmp_path / "none.json")
    with pytest.raises(RecordError, match=r"cannot read .*index\.jsonl"):
        read_index(tmp_path)


def test_the_work_of_writing_an_episode_does_not_grow_with_the_record(
    store: EpisodeStore, make_episode: MakeEpisode
) -> None:
    def work(number: int) -> int:
        episode = make_episode(f"e{number}", f"task {number}", calls=2, tokens=300)
        return calls_of(lambda: store.write(episode, TRAIN_1))

    works = [work(number) for number in range(200)]
    assert works[-1] <= 1.1 * works[1] < 5000


def test_the_work_of_listing_episodes_grows_with_their_number(
    store: EpisodeStore, tmp_path: Path, make_episode: MakeEpisode
) -> None:
    store.write(make_episode(), TRAIN_1)
    index = tmp_path / "episodes" / "index.jsonl"
    line = index.read_bytes()

    def work(entries: int) -> int:
        index.write_bytes(b"".join(line.replace(b"t1-0", f"t{number}-0".encode()) for number in range(entries)))
        listed = []
        calls = calls_of(lambda: listed.append(read_index(tmp_path)))
        assert len(listed[0]) == entries
        return calls

    assert work(3000) - work(2000) < 1000 * 130


def test_token_ids_that_spell_a_secret_are_withheld(tmp_path: Path) -> None:
    call = LlmCall("c", "e", (1, 2), (3,), (-0.1,), "stop", messages=({"role": "user", "content": "my zebra-9931"},))
    sample = Sample((1, 2, 3), (0, 0, 1), (0.0, 0.0, -0.1), (0, 1, 2), 1.0, (CallSpan("c", 2, 3),), "e")
    episode = Episode("e", Task("t", "q"), 0, "ok", 1.0, True, calls=(call,), samples=(sample,))
    path = tmp_path / "e.json"

    def redact(text: str) -> str:
        return text.replace("zebra-9931", "[redacted]")

    path.write_bytes(episode_to_json(episode, TRAIN_1, redact))
    read = read_episode(path)
    assert (read.calls[0].prompt_ids, read.calls[0].completion_ids, read.calls[0].logprobs) == ((), (), ())
    assert read.samples == ()
    assert read.calls[0].messages[0]["content"] == "my [redacted]"
    assert "withheld" in json.loads(path.read_bytes())
    path.write_bytes(episode_to_json(episode, TRAIN_1, str))
    assert read_episode(path) == episode
    assert "withheld" not in json.loads(path.read_bytes())
