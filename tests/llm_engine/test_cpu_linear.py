from __future__ import annotations

import pytest
import torch
from torch import nn

from astuner.llm_engine import cpu_linear
from astuner.llm_engine.cpu_linear import OneDnnLinear, linear, pack, unpack, use_onednn

BOUND = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True, params=[True, False], ids=["AVX512", "no AVX512"])
def has_fast_products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Set whether oneDNN computes the layers of `use_onednn`; without AVX512, MKL does."""
    monkeypatch.setattr(cpu_linear, "_has_fast_products", lambda: request.param)
    return request.param


def random(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size))).to(dtype)


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("rows", [(1,), (64,), (2, 5), (0,)], ids=str)
@pytest.mark.parametrize("bias", [None, random(600)], ids=["no bias", "bias"])
def test_packed_weights_give_the_same_products(dtype, rows, bias):
    x, weight = random(*rows, 300, dtype=dtype), random(600, 300, dtype=dtype)
    bias = None if bias is None else bias.to(dtype)
    expected = nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    for each in (weight, pack(weight)):
        product = linear(x, each, bias)
        assert product.shape == expected.shape
        assert product.dtype == dtype
        assert torch.allclose(product.double(), expected, rtol=0, atol=BOUND[dtype] * 300**0.5)


def test_small_weights_are_not_packed():
    weight = random(8, 8)
    assert pack(weight) is weight
    assert unpack(weight) is weight


@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_a_packed_weight_is_unpacked_to_the_same_bits(dtype):
    weight = random(601, 301, dtype=dtype)
    packed = pack(weight)
    assert packed.is_mkldnn == cpu_linear.is_packed(weight.numel(), dtype)
    assert torch.equal(unpack(packed), weight)


def models(*, bias: bool) -> tuple[nn.Module, nn.Module]:
    """Return a float64 model and the same model in float32, whose layers oneDNN computes."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(300, 600, bias=bias), nn.SiLU(), nn.Linear(600, 300, bias=bias))
    exact = nn.Sequential(nn.Linear(300, 600, bias=bias), nn.SiLU(), nn.Linear(600, 300, bias=bias)).double()
    exact.load_state_dict(layers.state_dict())
    use_onednn(layers)
    assert [type(layer) for layer in layers] == [OneDnnLinear, nn.SiLU, OneDnnLinear]
    return exact, layers


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_gradients_are_those_of_a_linear_layer(bias, frozen):
    gradients = []
    for model in models(bias=bias):
        model[2].requires_grad_(not frozen)
        dtype = model[0].weight.dtype
        x = random(3, 7, 300).to(dtype).requires_grad_()
        model(x).sin().sum().backward()
        gradients.append([x.grad, *(parameter.grad for parameter in model.parameters())])
    for expected, gradient in zip(*gradients, strict=True):
        if expected is None:
            assert gradient is None
        else:
            assert gradient.dtype == torch.float32
            assert (gradient - expected).norm() < 1e-6 * expected.norm()


def test_gradient_checkpointing_recomputes_the_same_values():
    _, model = models(bias=False)
    x = random(5, 300).requires_grad_()
    plain = torch.autograd.grad(model(x).sum(), x)[0]
    recomputed = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(recomputed.sum(), x)[0], plain)


def test_onednn_computes_layers_where_it_is_faster(has_fast_products):
    _, model = models(bias=False)
    node = type(model(random(5, 300)).grad_fn).__name__
    assert node == ("_LinearBackward" if has_fast_products else "MmBackward0")


def test_autocast_computes_in_its_dtype():
    _, model = models(bias=False)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(random(5, 300)).dtype == torch.bfloat16


def test_without_onednn_pytorch_multiplies(monkeypatch):
    monkeypatch.setattr(cpu_linear, "_is_available", lambda dtype: False)
    x, weight = random(5, 300), random(600, 300)
    assert pack(weight) is weight
    assert torch.equal(linear(x, weight), nn.functional.linear(x, weight))
