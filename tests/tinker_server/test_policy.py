"""The policy of a client session: temperature of the trained policy, alpha and modules of its adapters."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from astuner.backbone.training.tinker_policy import POLICY_EXTENSION, POLICY_HEADER, TinkerPolicy
from astuner.backbone.trinity.tinker_service import RemoteTinkerService, checkpoint_folder, save_checkpoint_model
from astuner.system.localhost import free_port
from astuner.tinker_server.trainable_model import BaseLanguageModel
from tests.tinker_server.served import Served, datum, logprobs_of, serving, tinker

# `load_state` of the client is deprecated, and still used by training loops.
pytestmark = pytest.mark.filterwarnings("ignore:DEPRECATED. TrainingClient.load_state:FutureWarning")
RNG = random.Random(5)
SEQUENCES = [[RNG.randrange(500) for _ in range(size)] for size in (9, 24, 17)]
# A large epsilon: otherwise, Adam's first steps depend on a gradient's sign only, and not on its size.
ADAM = {"learning_rate": 1e-2, "beta2": 0.999, "eps": 1e-2}


def supervised() -> list[Any]:
    return [datum(ids, weights=[1.0] * (len(ids) - 1)) for ids in SEQUENCES]


def reference_loss(model: Any, temperature: float = 1.0) -> Tensor:
    return torch.stack([-logprobs_of(model, ids, temperature).sum() for ids in SEQUENCES]).sum()


def adapters(module: Any) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.named_parameters() if value.requires_grad}


def peft_reference(base: Any, start: dict[str, Tensor], rank: int, alpha: int, modules: list[str] | str) -> Any:
    """A model with PEFT's adapters, which start with the weights of the server's."""
    model = get_peft_model(base, LoraConfig(r=rank, lora_alpha=alpha, target_modules=modules, task_type="CAUSAL_LM"))
    assert set(start) == set(adapters(model))
    model.load_state_dict(start, strict=False)
    return model


def train_both(training: Any, model: Any, temperature: float, steps: int = 3) -> None:
    """Take the same steps on the server and with PyTorch."""
    adam = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-2, betas=(0.9, 0.999), eps=1e-2, weight_decay=0
    )
    for _ in range(steps):
        passed = training.forward_backward(supervised(), "cross_entropy").result()
        training.optim_step(tinker.AdamParams(**ADAM)).result()
        loss = reference_loss(model, temperature)
        loss.backward()
        adam.step()
        adam.zero_grad()
        assert passed.metrics["loss:sum"] == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize("temperature", [0.7, 1.6])
def test_training_is_at_the_temperature(served: Served, fresh: Callable[[], Any], temperature: float):
    training = served.client(temperature=temperature).create_lora_training_client(served.model, rank=0).result()
    model = fresh()
    result = training.forward_backward(supervised(), "cross_entropy").result()
    for output, ids in zip(result.loss_fn_outputs, SEQUENCES, strict=True):
        expected = logprobs_of(model, ids, temperature).detach()
        torch.testing.assert_close(output["logprobs"].to_torch(), expected, atol=1e-5, rtol=0)
        assert (expected - logprobs_of(model, ids).detach()).abs().max() > 0.01
    reference_loss(model, temperature).backward()
    for actual, parameter in zip(served.trained(training.model_id).parameters(), model.parameters(), strict=True):
        scale = max(float(parameter.grad.abs().max()), 1.0)
        assert (actual.grad - parameter.grad).abs().max() <= 1e-5 * scale


def test_gradient_of_a_custom_loss_is_at_the_temperature(served: Served, fresh: Callable[[], Any]):
    def squares(data: list[Any], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        return torch.cat(logprobs).square().sum(), {}

    training = served.client(temperature=0.7).create_lora_training_client(served.model, rank=0).result()
    training.forward_backward_custom([datum(ids) for ids in SEQUENCES], squares).result()
    model = fresh()
    torch.cat([logprobs_of(model, ids, 0.7) for ids in SEQUENCES]).square().sum().backward()
    for actual, parameter in zip(served.trained(training.model_id).parameters(), model.parameters(), strict=True):
        assert (actual.grad - parameter.grad).abs().max() <= 1e-4 * max(float(parameter.grad.abs().max()), 1.0)


def test_sampled_and_trained_logprobs_agree_at_the_temperature(served: Served):
    client = served.client(temperature=0.7)
    training = client.create_lora_training_client(served.model, rank=0).result()
    prompt = SEQUENCES[0]
    params = tinker.SamplingParams(max_tokens=12, temperature=0.7, seed=1)
    sampling = training.save_weights_and_get_sampling_client().result()
    (sequence,) = sampling.sample(tinker.ModelInput.from_ints(prompt), 1, params).result().sequences
    ids = [*prompt, *sequence.tokens]
    (trained,) = (
        training.forward([datum(ids, weights=[0.0] * (len(ids) - 1))], "cross_entropy").result().loss_fn_outputs
    )
    scored = sampling.compute_logprobs(tinker.ModelInput.from_ints(ids)).result()
    for values in (trained["logprobs"].data, scored[1:]):
        torch.testing.assert_close(
            torch.tensor(values[len(prompt) - 1 :]), torch.tensor(sequence.logprobs), atol=1e-5, rtol=0
        )


def test_prompts_of_another_session_stay_at_temperature_1(served: Served, client: Any, fresh: Callable[[], Any]):
    served.client(temperature=0.7).create_sampling_client(base_model=served.model).result()
    scored = (
        client.create_sampling_client(base_model=served.model)
        .result()
        .compute_logprobs(tinker.ModelInput.from_ints(SEQUENCES[1]))
    )
    expected = logprobs_of(fresh(), SEQUENCES[1]).detach()
    torch.testing.assert_close(torch.tensor(scored.result()[1:]), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("alpha", "modules", "adapted"),
    [
        (64, ["q_proj", "down_proj"], {"q_proj", "down_proj"}),
        (8, ["v_proj"], {"v_proj"}),
        (64, r".*\.(k|o)_proj", {"k_proj", "o_proj"}),
    ],
)
def test_adapters_have_their_alpha_and_modules(
    served: Served, fresh: Callable[[], Any], alpha: int, modules: list[str] | str, adapted: set[str]
):
    client = served.client(temperature=0.7, lora_alpha=alpha, lora_target_modules=modules)
    training = client.create_lora_training_client(served.model, rank=4, seed=3).result()
    trained = served.trained(training.model_id)
    start = adapters(trained)
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in start} == adapted
    model = peft_reference(fresh(), start, 4, alpha, modules)
    train_both(training, model, 0.7)
    ends = adapters(model)
    for name, value in adapters(trained).items():
        # Where a gradient is near 0, Adam turns its rounding errors into changes of lr / eps = 1 times their size.
        assert (value - ends[name]).abs().max() <= 1e-5, name
        assert (value - start[name]).abs().max() > 1e-3, name
    # The weights that are sampled have the same scale. The reference gets the trained weights: its own differ by
    # rounding errors.
    model.load_state_dict(adapters(trained), strict=False)
    sampling = training.save_weights_and_get_sampling_client().result()
    params = tinker.SamplingParams(max_tokens=8, temperature=0.7)
    (sequence,) = sampling.sample(tinker.ModelInput.from_ints(SEQUENCES[0]), 1, params).result().sequences
    with torch.no_grad():
        expected = logprobs_of(model, [*SEQUENCES[0], *sequence.tokens], 0.7)[len(SEQUENCES[0]) - 1 :]
    torch.testing.assert_close(torch.tensor(sequence.logprobs), expected, atol=1e-5, rtol=0)


def test_alpha_with_the_modules_that_the_client_selects(served: Served, fresh: Callable[[], Any]):
    training = (
        served.client(lora_alpha=64)
        .create_lora_training_client(served.model, rank=2, seed=1, train_mlp=False, train_unembed=False)
        .result()
    )
    start = adapters(served.trained(training.model_id))
    model = peft_reference(fresh(), start, 2, 64, ["q_proj", "k_proj", "v_proj", "o_proj"])
    train_both(training, model, 1.0)


@pytest.mark.parametrize("knows_extension", [False, True])
def test_a_checkpoint_keeps_the_policy(
    base_model: BaseLanguageModel, fresh: Callable[[], Any], tmp_path: Path, knows_extension: bool
):
    policy: dict[str, Any] = {"temperature": 0.7, "lora_alpha": 64, "lora_target_modules": ["q_proj"]}
    with serving(base_model, tmp_path / "server") as served:
        training = served.client(**policy).create_lora_training_client(served.model, rank=4, seed=3).result()
        model = peft_reference(fresh(), adapters(served.trained(training.model_id)), 4, 64, ["q_proj"])
        train_both(training, model, 0.7)
        path = training.save_state("three").result().path
        going_on = training.forward(supervised(), "cross_entropy").result().metrics["loss:sum"]
    with serving(base_model, tmp_path / "server") as served:
        client = served.client(**policy) if knows_extension else served.client()
        resumed = client.create_training_client_from_state_with_optimizer(path).result()
        assert resumed.forward(supervised(), "cross_entropy").result().metrics["loss:sum"] == going_on
        again = resumed.save_state("again").result().path
        assert served.service.store.run(resumed.model_id).policy.model_dump() == policy
        for weights in (path, again):
            folder = tmp_path / weights.rpartition("/")[2]
            save_checkpoint_model(base_model.folder, checkpoint_folder(tmp_path / "server", weights), folder)
            saved = AutoModelForCausalLM.from_pretrained(folder).eval()
            assert reference_loss(saved, 0.7).item() == pytest.approx(going_on, rel=1e-5)


def test_a_checkpoint_of_an_earlier_version_has_the_values_of_tinker(served: Served, client: Any):
    training = client.create_lora_training_client(served.model, rank=2).result()
    path = training.save_state("one").result().path
    description = served.service.store.find(path).folder.parents[1] / "run.json"
    data = json.loads(description.read_text())
    del data["policy"]
    description.write_text(json.dumps(data))
    client.create_training_client_from_state_with_optimizer(path).result()
    assert served.service.store.run(training.model_id).policy.lora_alpha == 32


def test_a_checkpoint_with_other_adapters_is_rejected(served: Served):
    path = (
        served.client(lora_alpha=64)
        .create_lora_training_client(served.model, rank=2)
        .result()
        .save_state("s")
        .result()
        .path
    )
    other = served.client(lora_alpha=16).create_lora_training_client(served.model, rank=2).result()
    with pytest.raises(tinker.BadRequestError, match=r"'lora_alpha': 64.* this model has .*'lora_alpha': 16"):
        other.load_state(path).result()


def test_modules_that_the_model_lacks_are_rejected(served: Served):
    client = served.client(lora_target_modules=["nothing"])
    with pytest.raises(tinker.RequestFailedError, match=r"target_modules \['nothing'\] does not fit this model"):
        client.create_lora_training_client(served.model, rank=2).result()


@pytest.mark.parametrize("policy", ['{"temperature": 0}', '{"lora_alpha": 0}', '{"alpha": 3}', "0.7", "{"])
def test_an_invalid_policy_is_rejected(served: Served, policy: str):
    session = {"tags": [], "user_metadata": None, "sdk_version": "0.20.0"}
    answer = httpx.post(f"{served.url}/api/v1/create_session", json=session, headers={POLICY_HEADER: policy})
    assert answer.status_code == 422
    assert "is not a valid tinker request" in answer.json()["detail"]


def test_capabilities_name_the_extension(served: Served, client: Any, monkeypatch: pytest.MonkeyPatch):
    assert client._rest_client().get_server_capabilities().result().supported_models
    assert httpx.get(f"{served.url}/api/v1/get_server_capabilities").json()["extensions"] == [POLICY_EXTENSION]
    monkeypatch.setenv("TINKER_API_KEY", "tml-mine")
    assert RemoteTinkerService.probed(served.url, TinkerPolicy()).takes_policy
    assert not RemoteTinkerService.probed(f"http://127.0.0.1:{free_port()}", TinkerPolicy()).takes_policy
