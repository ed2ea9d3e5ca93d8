"""Passes, optimizer steps and adapters, compared with plain PyTorch."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from tests.tinker_server.served import Served, datum, logprobs_of, tinker

RNG = random.Random(1)
SEQUENCES = [[RNG.randrange(500) for _ in range(size)] for size in (9, 30, 2, 17, 30)]
ADVANTAGES = [[RNG.gauss(0, 1) for _ in ids[1:]] for ids in SEQUENCES]
# Some ratios are outside the clip range.
SAMPLED = [[RNG.gauss(-6, 1) for _ in ids[1:]] for ids in SEQUENCES]
WEIGHTS = [[float(RNG.random() < 0.7) for _ in ids[1:]] for ids in SEQUENCES]

# The tokens of each sequence that count for its ratio: all but the first, if there are several.
MASKS = [[float(place > 0 or len(ids) == 2) for place in range(len(ids) - 1)] for ids in SEQUENCES]


def gspo(new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    of_sequence = ((new - old) * mask).sum().div(mask.sum()).exp().detach()
    ratio = of_sequence * (new - new.detach()).exp()
    return -torch.min(ratio * advantages, ratio.clip(0.8, 1.2) * advantages)


FORMULAS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "importance_sampling": lambda new, old, a: -((new - old).exp() * a),
    "ppo": lambda new, old, a: -torch.min((new - old).exp() * a, (new - old).exp().clip(0.8, 1.2) * a),
    "cispo": lambda new, old, a: -((new - old).exp().clip(0.8, 1.2).detach() * new * a),
    "dro": lambda new, old, a: -(new * a - 0.5 * 0.05 * (new - old) ** 2),
}


def supervised() -> list[Any]:
    return [datum(ids, weights=weights) for ids, weights in zip(SEQUENCES, WEIGHTS, strict=True)]


def policy_data(**inputs: list[list[float]]) -> list[Any]:
    columns = {"logprobs": SAMPLED, "advantages": ADVANTAGES, **inputs}
    return [datum(ids, **{key: rows[place] for key, rows in columns.items()}) for place, ids in enumerate(SEQUENCES)]


def cross_entropy(model: Any) -> Tensor:
    rows = zip(SEQUENCES, WEIGHTS, strict=True)
    return sum((-(logprobs_of(model, ids) * torch.tensor(w)).sum() for ids, w in rows), torch.zeros(()))


def assert_same_weights(model: Any, expected: Any, tolerance: float) -> None:
    actual = dict(model.named_parameters())
    assert actual.keys() == dict(expected.named_parameters()).keys()
    for name, value in expected.named_parameters():
        assert (actual[name] - value).abs().max() <= tolerance, name


def test_steps_equal_plain_pytorch(served: Served, client: Any, fresh: Callable[[], Any]):
    training = client.create_lora_training_client(served.model, rank=0).result()
    model = fresh()
    adam = torch.optim.AdamW(model.parameters())
    # With an eps near 0, Adam's steps amplify rounding errors of near-zero gradients.
    steps = [
        tinker.AdamParams(learning_rate=1e-3, eps=1e-2, grad_clip_norm=5.0),
        tinker.AdamParams(learning_rate=3e-3, beta1=0.8, beta2=0.99, eps=1e-2, weight_decay=0.1),
        tinker.AdamParams(learning_rate=3e-3, eps=1e-3),
    ]
    for number, params in enumerate(steps):
        passes = 1 + number % 2  # gradients accumulate until the step
        losses = [training.forward_backward(supervised(), "cross_entropy") for _ in range(passes)]
        stepped = training.optim_step(params).result()
        for _ in range(passes):
            loss = cross_entropy(model)
            loss.backward()
        assert losses[-1].result().metrics["loss:sum"] == pytest.approx(loss.item(), rel=1e-5)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), params.grad_clip_norm or float("inf"))
        assert stepped.metrics["optim/grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
        adam.param_groups[0].update(
            lr=params.learning_rate,
            betas=(params.beta1, params.beta2),
            eps=params.eps,
            weight_decay=params.weight_decay,
        )
        adam.step()
        adam.zero_grad()
        assert_same_weights(served.trained(training.model_id), model, 1e-6)
    assert max((p - q).abs().max() for p, q in zip(model.parameters(), fresh().parameters(), strict=True)) > 1e-3


@pytest.mark.parametrize("name", [*FORMULAS, "gspo"])
def test_losses_equal_their_formulas(served: Served, client: Any, fresh: Callable[[], Any], name: str):
    training = client.create_lora_training_client(served.model, rank=0).result()
    model = fresh()
    new = [logprobs_of(model, ids) for ids in SEQUENCES]
    rows = [tuple(map(torch.tensor, row)) for row in zip(SAMPLED, ADVANTAGES, MASKS, strict=True)]
    if name == "gspo":
        data = policy_data(sequence_ratio_mask=MASKS)
        losses = [gspo(n, *row) for n, row in zip(new, rows, strict=True)]
    else:
        data = policy_data()
        losses = [FORMULAS[name](n, old, a) for n, (old, a, _) in zip(new, rows, strict=True)]
    torch.cat(losses).sum().backward()
    result = training.forward_backward(data, name).result()
    assert result.metrics["loss:sum"] == pytest.approx(torch.cat(losses).sum().item(), rel=1e-4)
    for output, expected, loss in zip(result.loss_fn_outputs, new, losses, strict=True):
        torch.testing.assert_close(output["logprobs"].to_torch(), expected.detach(), atol=1e-5, rtol=0)
        torch.testing.assert_close(output["elementwise_loss"].to_torch(), loss.detach(), atol=1e-4, rtol=1e-4)
    trained = served.trained(training.model_id)
    for actual, parameter in zip(trained.parameters(), model.parameters(), strict=True):
        scale = parameter.grad.abs().max()
        assert (actual.grad - parameter.grad).abs().max() <= 1e-5 * max(scale, 1.0)


def test_loss_options_are_used(served: Served, client: Any):
    training = client.create_lora_training_client(served.model, rank=0).result()
    narrow = {"clip_low_threshold": 0.99, "clip_high_threshold": 1.01}
    data = policy_data()
    by_default, narrowly = (training.forward(data, "ppo", config).result() for config in (None, narrow))
    assert narrowly.metrics["loss:sum"] != pytest.approx(by_default.metrics["loss:sum"], rel=1e-3)


def test_custom_loss(served: Served, client: Any):
    def ppo(data: list[Any], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        rows = zip(logprobs, SAMPLED, ADVANTAGES, strict=True)
        loss = sum(FORMULAS["ppo"](new, torch.tensor(old), torch.tensor(a)).sum() for new, old, a in rows)
        return loss, {"custom": 1.0}

    custom, builtin = (client.create_lora_training_client(served.model, rank=0).result() for _ in range(2))
    result = custom.forward_backward_custom([datum(ids) for ids in SEQUENCES], ppo).result()
    assert result.metrics["custom"] == 1.0
    builtin.forward_backward(policy_data(), "ppo").result()
    gradients = [[p.grad for p in served.trained(item.model_id).parameters()] for item in (custom, builtin)]
    for actual, expected in zip(*gradients, strict=True):
        assert (actual - expected).abs().max() <= 1e-5 * max(expected.abs().max(), 1.0)


def test_only_adapters_are_trained(served: Served, client: Any, fresh: Callable[[], Any]):
    before = {name: value.clone() for name, value in served.service.base_model.weights().items()}
    training = client.create_lora_training_client(served.model, rank=4, seed=3).result()
    trained = served.trained(training.model_id)
    start = {name: value.detach().clone() for name, value in trained.named_parameters() if value.requires_grad}
    assert start
    assert all("lora_" in name for name in start)
    # The same with peft on a separate model; embeddings are untied, so that the output embedding can have an adapter.
    base = fresh()
    base.lm_head.weight = torch.nn.Parameter(base.lm_head.weight.detach().clone())
    base.config.tie_word_embeddings = False
    everything = [name for name, module in base.named_modules() if isinstance(module, torch.nn.Linear)]
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=32, target_modules=everything, task_type="CAUSAL_LM"))
    model.load_state_dict(start, strict=False)
    adam = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, eps=1e-2, weight_decay=0)
    for _ in range(3):
        training.forward_backward(supervised(), "cross_entropy").result()
        training.optim_step(tinker.AdamParams(learning_rate=1e-3, eps=1e-2, beta2=0.999)).result()
        cross_entropy(model).backward()
        adam.step()
        adam.zero_grad()
    assert_same_weights(trained, model, 1e-6)
    changed = [name for name, value in trained.named_parameters() if name in start and not value.equal(start[name])]
    assert set(changed) == set(start)
    assert all(value.equal(before[name]) for name, value in served.service.base_model.weights().items())
    again = client.create_lora_training_client(served.model, rank=4, seed=3).result()
    assert all(
        value.equal(start[name]) for name, value in served.trained(again.model_id).named_parameters() if name in start
    )


def test_adapted_layers_are_selectable(served: Served, client: Any):
    def adapted(**selected: bool) -> set[str]:
        chosen = {"train_mlp": False, "train_attn": False, "train_unembed": False, **selected}
        training = client.create_lora_training_client(served.model, rank=2, **chosen).result()
        names = [name for name, p in served.trained(training.model_id).named_parameters() if p.requires_grad]
        return {name.split(".lora_")[0].rpartition(".")[2] for name in names}

    assert adapted(train_attn=True) == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert adapted(train_mlp=True) == {"gate_proj", "up_proj", "down_proj"}
    assert adapted(train_unembed=True) == {"lm_head"}


def test_pipelined_requests_run_in_order(served: Served, client: Any):
    waiting, hasty = (client.create_lora_training_client(served.model, rank=0).result() for _ in range(2))
    for _ in range(4):
        waiting.forward_backward(supervised(), "cross_entropy").result()
        waiting.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
    sent = []
    for _ in range(4):
        sent.append(hasty.forward_backward(supervised(), "cross_entropy"))
        sent.append(hasty.optim_step(tinker.AdamParams(learning_rate=1e-2)))
    for future in sent:
        future.result()
    assert_same_weights(served.trained(hasty.model_id), served.trained(waiting.model_id), 0.0)


def test_repeated_request_runs_once(served: Served, client: Any):
    once, twice = (client.create_lora_training_client(served.model, rank=0).result() for _ in range(2))
    for training in (once, twice):
        training.forward_backward(supervised(), "cross_entropy").result()
    # Like after a lost response: the client reuses the sequence number.
    twice._request_id_counter = twice._turn_counter = 0
    twice.forward_backward(supervised(), "cross_entropy").result()
    for training in (once, twice):
        training.optim_step(tinker.AdamParams()).result()
    assert_same_weights(served.trained(twice.model_id), served.trained(once.model_id), 0.0)


def test_non_finite_loss_changes_no_weights(served: Served, client: Any, fresh: Callable[[], Any]):
    training = client.create_lora_training_client(served.model, rank=0).result()
    training.forward_backward(supervised(), "cross_entropy").result()
    far = datum(SEQUENCES[0], logprobs=[-1000.0] * 8, advantages=[1.0] * 8)
    with pytest.raises(tinker.RequestFailedError, match="the loss is not finite; the accumulated gradient was dropped"):
        training.forward_backward([far], "importance_sampling").result()
    with pytest.raises(tinker.RequestFailedError, match="optim_step without a gradient"):
        training.optim_step(tinker.AdamParams()).result()
    assert_same_weights(served.trained(training.model_id), fresh(), 0.0)
