"""Two clients at once: own sessions, models, optimizer states and checkpoints; the failure of one leaves the other."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest

from astuner.tinker_server.service import Limits
from astuner.tinker_server.trainable_model import BaseLanguageModel
from tests.tinker_server.served import Served, datum, serving, tinker

RNG = random.Random(7)
DATA = [[[RNG.randrange(500) for _ in range(16)] for _ in range(4)] for _ in range(2)]
PROMPT = tinker.ModelInput.from_ints([1, 2, 3])
ONE_TOKEN = tinker.SamplingParams(max_tokens=1)


def train(training: Any, sequences: list[list[int]], steps: int = 4) -> list[float]:
    """Train on the same sequences in each step, and return the losses."""
    losses = []
    for _ in range(steps):
        passed = training.forward_backward([datum(ids) for ids in sequences], "cross_entropy")
        training.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
        losses.append(passed.result().metrics["loss:sum"])
    return losses


def test_clients_that_train_at_once_do_not_affect_each_other(base_model: BaseLanguageModel, tmp_path: Path):
    with serving(base_model, tmp_path, Limits(models=8)) as served:
        alone = [
            train(served.client().create_lora_training_client(served.model, rank=4, seed=3).result(), sequences)
            for sequences in DATA
        ]
        clients = [served.client() for _ in DATA]
        models = [client.create_lora_training_client(served.model, rank=4, seed=3).result() for client in clients]
        together: list[list[float]] = [[], []]
        threads = [
            threading.Thread(target=lambda place=place: together[place].extend(train(models[place], DATA[place])))
            for place in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert together == alone
        assert alone[0] != alone[1]
        # A checkpoint of the same name has the weights and the optimizer state of its own client.
        paths = [model.save_state("same name").result().path for model in models]
        assert paths[0] != paths[1]
        expected = [train(model, sequences) for model, sequences in zip(models, DATA, strict=True)]
        clients[0]._rest_client().delete_checkpoint_from_tinker_path(paths[0]).result()
        resumed = clients[1].create_training_client_from_state_with_optimizer(paths[1]).result()
        assert train(resumed, DATA[1]) == expected[1]
        sessions = {client.holder.get_session_id() for client in clients}
        assert len(sessions) == 2
        runs = [clients[0]._rest_client().get_session(session).result().training_run_ids for session in sessions]
        assert sorted(map(len, runs)) == [1, 2]


def test_weights_without_a_name_belong_to_their_client(served: Served, client: Any):
    training = client.create_lora_training_client(served.model, rank=2).result()
    sampling = training.save_weights_and_get_sampling_client().result()
    (unnamed,) = served.service.store.checkpoints(training.model_id)
    other = served.client()
    with pytest.raises(tinker.PermissionDeniedError, match="has no name and can be used only by the client that saved"):
        other.create_sampling_client(unnamed.path).result()
    assert other._rest_client().list_checkpoints(training.model_id).result().checkpoints == []
    client.create_sampling_client(unnamed.path).result().sample(PROMPT, 1, ONE_TOKEN).result()
    named = training.save_weights_for_sampler("named").result().path
    other.create_sampling_client(named).result().sample(PROMPT, 1, ONE_TOKEN).result()
    assert sampling.sample(PROMPT, 1, ONE_TOKEN).result().sequences[0].tokens


def test_a_client_that_fails_or_closes_leaves_the_other(base_model: BaseLanguageModel, tmp_path: Path):
    with serving(base_model, tmp_path, Limits(models=2)) as served:
        failing, other = served.client(), served.client()
        models = [item.create_lora_training_client(served.model, rank=4, seed=3).result() for item in (failing, other)]
        before = train(models[1], DATA[1], 2)
        far = datum([1, 2, 3], logprobs=[-1000.0] * 2, advantages=[1.0] * 2)
        waiting = models[1].forward_backward([datum(ids) for ids in DATA[1]], "cross_entropy")
        with pytest.raises(tinker.RequestFailedError, match="the loss is not finite"):
            models[0].forward_backward([far], "importance_sampling").result()
        assert waiting.result().metrics["loss:sum"] < before[-1]
        failing.close("errored", "its loss is not finite").result()
        assert [session.session_id for session in served.service.sessions] == [other.holder.get_session_id()]
        assert len(served.service.models) == 1
        models[1].optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
        after = train(models[1], DATA[1], 2)
        assert after[-1] < before[-1]
        sampling = models[1].save_weights_and_get_sampling_client().result()
        assert len(sampling.sample(PROMPT, 2, ONE_TOKEN).result().sequences) == 2
        # The models of the closed client made room.
        served.client().create_lora_training_client(served.model, rank=2).result()
