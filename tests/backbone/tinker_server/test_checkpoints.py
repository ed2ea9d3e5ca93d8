"""Weights on disk: restarts, listing, deletion, limits."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from astuner.backbone.tinker_server.checkpoints import CheckpointStore
from astuner.backbone.tinker_server.refusal import Refusal
from astuner.backbone.tinker_server.service import Limits
from astuner.backbone.tinker_server.starting_model import StartingModel
from tests.backbone.tinker_server.served import Served, datum, serving, tinker

RNG = random.Random(3)
DATA = [[RNG.randrange(500) for _ in range(20)] for _ in range(6)]
PROMPT = tinker.ModelInput.from_ints([1, 2, 3])


def train(training: Any, steps: int) -> list[float]:
    """Train on the next sequences and return the losses."""
    losses = []
    for number in range(steps):
        data = [datum(ids) for ids in DATA[number : number + 2]]
        losses.append(training.forward_backward(data, "cross_entropy").result().metrics["loss:sum"])
        training.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
    return losses


def weights_of(served: Served, training: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in served.trained(training.model_id).named_parameters()}


@pytest.mark.parametrize("rank", [0, 4])
def test_a_restarted_server_goes_on_where_the_last_one_stopped(start: StartingModel, tmp_path: Path, rank: int):
    with serving(start, tmp_path) as served:
        training = served.client().create_lora_training_client(served.model, rank=rank)
        train(training, 3)
        state = training.save_state("three").result().path
        samples = training.save_weights_for_sampler("three").result().path
        expected = train(training, 3)
        last = weights_of(served, training)
    with serving(start, tmp_path) as served:
        client = served.client()
        training = client.create_training_client_from_state_with_optimizer(state)
        assert train(training, 3) == expected
        own = weights_of(served, training)
        assert all(torch.equal(own[name], value) for name, value in last.items())
        anew = client.create_training_client_from_state(state)  # the optimiser begins anew
        losses = train(anew, 3)
        assert losses[0] == expected[0]
        assert losses[1] != expected[1]
        sampling = client.create_sampling_client(samples)
        assert sampling.sample(PROMPT, 1, tinker.SamplingParams(max_tokens=3)).result().sequences[0].tokens


def test_loading_takes_everything_back(served: Served, client: Any):
    training = client.create_lora_training_client(served.model, rank=2)
    train(training, 1)
    path = training.save_state("one").result().path
    before = weights_of(served, training)
    expected = train(training, 2)
    training.forward_backward([datum(DATA[0])], "cross_entropy").result()  # dropped by loading
    training.load_state_with_optimizer(path).result()
    own = weights_of(served, training)
    assert all(torch.equal(own[name], value) for name, value in before.items())
    assert train(training, 2) == expected


def test_names(served: Served, client: Any):
    training = client.create_lora_training_client(served.model, rank=2)
    path = training.save_state("my run–5 %2F é").result().path
    assert path == f"tinker://{training.model_id}/weights/my run–5 %2F é"
    training.load_state(path).result()
    with pytest.raises(
        tinker.RequestFailedError, match="is there already; choose another name, or overwrite=True"
    ) as one:
        training.save_state("my run–5 %2F é").result()
    assert one.value.category == "user"
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
        "tinker://RUN/optimisers/one",
        "/etc/passwd",
        "tinker://RUN/weights/..",
    ],
)
def test_paths_that_lead_nowhere(served: Served, client: Any, path: str):
    training = client.create_lora_training_client(served.model, rank=2)
    training.save_state("one").result()
    with pytest.raises(tinker.NotFoundError, match="there is no checkpoint"):
        training.load_state(path.replace("RUN", training.model_id)).result()


def test_a_checkpoint_of_another_kind_is_not_loaded(served: Served, client: Any):
    training = client.create_lora_training_client(served.model, rank=2)
    other = client.create_lora_training_client(served.model, rank=3)
    with pytest.raises(tinker.BadRequestError, match=r"has adapters .*'rank': 3.* this model has .*'rank': 2"):
        training.load_state(other.save_state("other").result().path).result()
    with pytest.raises(tinker.BadRequestError, match="is for samplers"):
        training.load_state(training.save_weights_for_sampler("s").result().path).result()


def test_a_spoilt_checkpoint_says_so(served: Served, client: Any):
    training = client.create_lora_training_client(served.model, rank=2)
    path = training.save_state("one").result().path
    (served.service.store.find(path).folder / "trained.safetensors").write_bytes(b"spoilt")
    with pytest.raises(tinker.RequestFailedError, match=r"cannot be read .*; load another checkpoint"):
        training.load_state(path).result()


def test_listing_and_deleting(start: StartingModel, tmp_path: Path):
    with serving(start, tmp_path) as served:
        client = served.client()
        rest = client.create_rest_client()
        training = client.create_lora_training_client(served.model, rank=2, user_metadata={"by": "us"})
        state = training.save_state("state").result().path
        samples = training.save_weights_for_sampler("samples", ttl_seconds=3600).result().path
        listed = {one.tinker_path: one for one in rest.list_checkpoints(training.model_id).result().checkpoints}
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
        assert not (tmp_path / training.model_id / "weights" / "state").exists()
        with pytest.raises(tinker.NotFoundError):
            rest.delete_checkpoint_from_tinker_path(state).result()
        # Who was just told of samplers' weights may still sample from them; Trinity-RFT leaves the kind out.
        rest.delete_checkpoint(training.model_id, "samples").result()
        client.create_sampling_client(samples).sample(PROMPT, 1, tinker.SamplingParams(max_tokens=1)).result()
        (left,) = rest.list_checkpoints(training.model_id).result().checkpoints
        assert (left.expires_at - left.time).total_seconds() < 120
        rest.set_checkpoint_ttl_from_tinker_path(samples, None).result()
        (left,) = rest.list_checkpoints(training.model_id).result().checkpoints
        assert left.expires_at is None
        with pytest.raises(tinker.APIStatusError, match=r"this server has no POST .*/publish"):
            rest.publish_checkpoint_from_tinker_path(samples).result()


def test_what_has_expired_is_removed(served: Served, client: Any):
    training = client.create_lora_training_client(served.model, rank=2)
    store = served.service.store
    gone, kept = (store.find(training.save_state(name).result().path) for name in ("gone", "kept"))
    store.set_ttl(gone, -1)
    assert gone.path in store.delete_expired()
    assert [one.path for one in store.checkpoints(training.model_id)] == [kept.path]


def test_old_weights_for_samplers_make_room(start: StartingModel, tmp_path: Path, log: list[str]):
    with serving(start, tmp_path, Limits(snapshots=3, engines=1)) as served:
        client = served.client()
        training = client.create_lora_training_client(served.model, rank=2)
        params = tinker.SamplingParams(max_tokens=1)
        state = training.save_state("state").result().path
        paths = [training.save_weights_for_sampler(f"s{number}").result().path for number in range(3)]
        used = client.create_sampling_client(paths[0])
        unused = client.create_sampling_client(paths[1])
        used.sample(PROMPT, 1, params).result()
        for number in range(3, 5):
            paths.append(training.save_weights_for_sampler(f"s{number}").result().path)
        kept = {one.path for one in served.service.store.checkpoints(training.model_id)}
        assert kept == {state, paths[0], paths[3], paths[4]}
        assert [line.split()[0] for line in log if "makes room" in line] == [paths[2], paths[1]]
        with pytest.raises(
            tinker.RequestFailedError, match=r"is gone: .*made room for newer weights \(--max-samplers\)"
        ):
            unused.sample(PROMPT, 1, params).result()
        used.sample(PROMPT, 1, params).result()


def test_a_full_disk_is_an_error_of_that_request(served: Served, client: Any, monkeypatch: pytest.MonkeyPatch):
    training = client.create_lora_training_client(served.model, rank=2)
    train(training, 1)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("astuner.backbone.tinker_server.checkpoints.save_file", full)
        with pytest.raises(
            tinker.RequestFailedError, match=r"could not be written to .*No space left.*MiB are free there"
        ):
            training.save_state("one").result()
    assert served.service.store.checkpoints(training.model_id) == []
    training.save_state("one").result()


def test_a_run_is_found_by_its_own_id_only(tmp_path: Path):
    store = CheckpointStore(tmp_path / "store")
    (tmp_path / "run.json").write_text("{}")
    for run_id in ("..", ".", "", "a/../..", "nothing"):
        with pytest.raises(Refusal, match="no training run"):
            store.run(run_id)
    assert store.runs() == []
    assert store.checkpoints() == []
