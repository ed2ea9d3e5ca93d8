"""Checkpoints: restarts, listing, deletion, limits."""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import torch

from astuner.tinker_server.checkpoints import CheckpointStore
from astuner.tinker_server.service import Limits
from astuner.tinker_server.trainable_model import BaseLanguageModel
from astuner.tinker_server.wire import TinkerRequestError
from tests.tinker_server.served import Served, datum, serving, tinker

# `load_state` of the client is deprecated, and still used by training loops.
pytestmark = pytest.mark.filterwarnings("ignore:DEPRECATED. TrainingClient.load_state:FutureWarning")
RNG = random.Random(3)
DATA = [[RNG.randrange(500) for _ in range(20)] for _ in range(6)]
PROMPT = tinker.ModelInput.from_ints([1, 2, 3])


def train(training: Any, steps: int) -> list[float]:
    """Take training steps and return the losses."""
    losses = []
    for number in range(steps):
        data = [datum(ids) for ids in DATA[number : number + 2]]
        losses.append(training.forward_backward(data, "cross_entropy").result().metrics["loss:sum"])
        training.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
    return losses


def weights_of(served: Served, training: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in served.trained(training.model_id).named_parameters()}


@pytest.mark.parametrize("rank", [0, 4])
def test_training_resumes_exactly_after_a_server_restart(base_model: BaseLanguageModel, tmp_path: Path, rank: int):
    with serving(base_model, tmp_path) as served:
        training = served.client().create_lora_training_client(served.model, rank=rank).result()
        train(training, 3)
        state = training.save_state("three").result().path
        samples = training.save_weights_for_sampler("three").result().path
        expected = train(training, 3)
        last = weights_of(served, training)
    with serving(base_model, tmp_path) as served:
        client = served.client()
        training = client.create_training_client_from_state_with_optimizer(state).result()
        assert train(training, 3) == expected
        loaded = weights_of(served, training)
        assert all(torch.equal(loaded[name], value) for name, value in last.items())
        reset = client.create_training_client_from_state(state).result()  # resets the optimizer
        losses = train(reset, 3)
        assert losses[0] == expected[0]
        assert losses[1] != expected[1]
        sampling = client.create_sampling_client(samples).result()
        assert sampling.sample(PROMPT, 1, tinker.SamplingParams(max_tokens=3)).result().sequences[0].tokens


def test_loading_restores_weights_and_optimizer(served: Served, client: Any):
    training = client.create_lora_training_client(served.model, rank=2).result()
    train(training, 1)
    path = training.save_state("one").result().path
    before = weights_of(served, training)
    expected = train(training, 2)
    training.forward_backward([datum(DATA[0])], "cross_entropy").result()  # loading drops this gradient
    training.load_state_with_optimizer(path).result()
    loaded = weights_of(served, training)
    assert all(torch.equal(loaded[name], value) for name, value in before.items())
    assert train(training, 2) == expected


def test_checkpoint_names(served: Served, client: Any):
    training = client.create_lora_training_client(served.model, rank=2).result()
    path = training.save_state("my run–5 %2F é").result().path
    assert path == f"tinker://{training.model_id}/weights/my run–5 %2F é"
    training.load_state(path).result()
    with pytest.raises(
        tinker.RequestFailedError, match="already exists; choose another name, or set overwrite=True"
    ) as raised:
        training.save_state("my run–5 %2F é").result()
    assert raised.value.category == "user"
    train(training, 1)
    training.save_state("my run–5 %2F é", overwrite=True).result()
    for name in ("a/b", "../up", ".", "..", ".hidden", "", "line\nbreak", "x" * 201):
        with pytest.raises(tinker.UnprocessableEntityError, match="path"):
            training.save_state(name).result()


@pytest.mark.parametrize(
    "path",
    [
        "tinker://nothing/weights/x",
        "tinker://../../weights/x",
        "tinker://..%2f..%2fetc/weights/x",
        "tinker://RUN/weights/../weights/one",
        "tinker://RUN/optimizers/one",
        "/etc/passwd",
        "tinker://RUN/weights/..",
    ],
)
def test_invalid_paths(served: Served, client: Any, path: str):
    training = client.create_lora_training_client(served.model, rank=2).result()
    training.save_state("one").result()
    with pytest.raises(tinker.NotFoundError, match="there is no checkpoint"):
        training.load_state(path.replace("RUN", training.model_id)).result()


def test_mismatched_checkpoint_is_rejected(served: Served, client: Any):
    training = client.create_lora_training_client(served.model, rank=2).result()
    other = client.create_lora_training_client(served.model, rank=3).result()
    with pytest.raises(tinker.BadRequestError, match=r"has the adapters .*'rank': 3.* this model has .*'rank': 2"):
        training.load_state(other.save_state("other").result().path).result()
    with pytest.raises(tinker.BadRequestError, match="is a sampler checkpoint"):
        training.load_state(training.save_weights_for_sampler("s").result().path).result()


def test_corrupt_checkpoint_is_reported(served: Served, client: Any):
    training = client.create_lora_training_client(served.model, rank=2).result()
    path = training.save_state("one").result().path
    (served.service.store.find(path).folder / "trained.safetensors").write_bytes(b"corrupt")
    with pytest.raises(tinker.RequestFailedError, match=r"cannot be read .*; load another checkpoint"):
        training.load_state(path).result()


def test_listing_and_deleting(base_model: BaseLanguageModel, tmp_path: Path):
    with serving(base_model, tmp_path) as served:
        client = served.client()
        rest = client._rest_client()
        training = client.create_lora_training_client(served.model, rank=2, user_metadata={"by": "us"}).result()
        state = training.save_state("state").result().path
        samples = training.save_weights_for_sampler("samples", ttl_seconds=3600).result().path
        listed = {item.tinker_path: item for item in rest.list_checkpoints(training.model_id).result().checkpoints}
        assert set(listed) == {state, samples}
        assert [listed[path].checkpoint_type for path in (state, samples)] == ["training", "sampler"]
        assert listed[state].expires_at is None
        assert listed[samples].expires_at is not None
        assert rest.list_user_checkpoints(limit=1).result().cursor.total_count == 2
        (run,) = rest.list_training_runs().result().training_runs
        assert (run.training_run_id, run.lora_rank, run.user_metadata) == (training.model_id, 2, {"by": "us"})
        assert run.last_checkpoint.tinker_path == state
        assert rest.get_training_run_by_tinker_path(samples).result().training_run_id == training.model_id
        assert rest.get_session(client.holder.get_session_id()).result().training_run_ids == [training.model_id]
        assert rest.get_weights_info_by_tinker_path(state).result().lora_rank == 2
        rest.delete_checkpoint_from_tinker_path(state).result()
        assert not (tmp_path / quote(training.model_id, safe="") / "weights" / "state").exists()
        with pytest.raises(tinker.NotFoundError):
            rest.delete_checkpoint_from_tinker_path(state).result()
        # Clients may still sample from deleted sampler weights for a minute. Trinity-RFT omits the kind.
        rest.delete_checkpoint(training.model_id, "samples").result()
        client.create_sampling_client(samples).result().sample(PROMPT, 1, tinker.SamplingParams(max_tokens=1)).result()
        (remaining,) = rest.list_checkpoints(training.model_id).result().checkpoints
        assert (remaining.expires_at - remaining.time).total_seconds() < 120
        rest.set_checkpoint_ttl_from_tinker_path(samples, None).result()
        (remaining,) = rest.list_checkpoints(training.model_id).result().checkpoints
        assert remaining.expires_at is None
        with pytest.raises(tinker.APIStatusError, match=r"this server has no POST .*/publish"):
            rest.publish_checkpoint_from_tinker_path(samples).result()


def test_expired_checkpoint_is_deleted(served: Served, client: Any):
    training = client.create_lora_training_client(served.model, rank=2).result()
    store = served.service.store
    expired, permanent = (store.find(training.save_state(name).result().path) for name in ("expired", "permanent"))
    store.set_ttl(expired, -1)
    assert expired.path in store.delete_expired()
    assert [item.path for item in store.checkpoints(training.model_id)] == [permanent.path]


def test_old_sampler_checkpoints_are_deleted(base_model: BaseLanguageModel, tmp_path: Path, log: list[str]):
    with serving(base_model, tmp_path, Limits(snapshots=3, engines=1)) as served:
        client = served.client()
        training = client.create_lora_training_client(served.model, rank=2).result()
        params = tinker.SamplingParams(max_tokens=1)
        state = training.save_state("state").result().path
        paths = [training.save_weights_for_sampler(f"s{number}").result().path for number in range(3)]
        used = client.create_sampling_client(paths[0]).result()
        unused = client.create_sampling_client(paths[1]).result()
        used.sample(PROMPT, 1, params).result()
        for number in range(3, 5):
            paths.append(training.save_weights_for_sampler(f"s{number}").result().path)
        remaining = {item.path for item in served.service.store.checkpoints(training.model_id)}
        assert remaining == {state, paths[0], paths[3], paths[4]}
        assert [line.split()[0] for line in log if "to make room" in line] == [paths[2], paths[1]]
        with pytest.raises(
            tinker.RequestFailedError, match=r"no longer exists: .*newer sampler weights replaced it \(--max-samplers\)"
        ):
            unused.sample(PROMPT, 1, params).result()
        used.sample(PROMPT, 1, params).result()


def test_full_disk_fails_only_that_request(served: Served, client: Any, monkeypatch: pytest.MonkeyPatch):
    training = client.create_lora_training_client(served.model, rank=2).result()
    train(training, 1)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("astuner.tinker_server.checkpoints.save_file", full)
        with pytest.raises(tinker.RequestFailedError, match=r"could not be written to .*No space left.*MiB are free"):
            training.save_state("one").result()
    assert served.service.store.checkpoints(training.model_id) == []
    training.save_state("one").result()


def test_copies_links_and_incomplete_folders_are_not_checkpoints(base_model: BaseLanguageModel, tmp_path: Path):
    with serving(base_model, tmp_path) as served:
        training = served.client().create_lora_training_client(served.model, rank=2).result()
        path = training.save_state("state", ttl_seconds=3600).result().path
        run_folder = tmp_path / quote(training.model_id, safe="")
        weights = run_folder / "weights"
        for name in ("state.bak", "state copy", "incomplete", "damaged", "odd"):
            shutil.copytree(weights / "state", weights / name)
        (weights / "link").symlink_to(weights / "state")
        (weights / "incomplete" / "trained.safetensors").unlink()
        (weights / "damaged" / "checkpoint.json").write_bytes(b"\xff{")
        (weights / "odd" / "checkpoint.json").write_text('{"time": 5}')
        shutil.copytree(run_folder, tmp_path / f"{run_folder.name}.bak", symlinks=True)
        store = CheckpointStore(tmp_path)
        assert [checkpoint.path for checkpoint in store.checkpoints()] == [path]
        assert [run.run_id for run in store.runs()] == [training.model_id]
        for name in ("state.bak", "link", "incomplete", "damaged", "odd"):
            with pytest.raises(TinkerRequestError, match="there is no checkpoint"):
                store.find(f"tinker://{training.model_id}/weights/{name}")
        store.set_ttl(store.find(path), 1)
        time.sleep(1.1)
        assert store.delete_expired() == [path]
        assert {folder.name for folder in weights.iterdir()} == {
            "state.bak", "state copy", "incomplete", "damaged", "odd", "link",
        }  # fmt: skip


def test_run_id_must_not_be_a_path(tmp_path: Path):
    store = CheckpointStore(tmp_path / "store")
    (tmp_path / "run.json").write_text("{}")
    for run_id in ("..", ".", "", "a/../..", "nothing"):
        with pytest.raises(TinkerRequestError, match="no training run"):
            store.run(run_id)
    assert store.runs() == []
    assert store.checkpoints() == []
