from __future__ import annotations

import pytest
import torch

from astuner.errors import ModelError
from astuner.llm_engine.embedded.forward import WeightNames

from .tiny_models import qwen3


@pytest.fixture
def tied():
    return qwen3()


def test_a_tied_weight_may_appear_under_one_name(tied):
    names = WeightNames(tied)
    new = qwen3(seed=1).state_dict()
    del new["lm_head.weight"]
    resolved = names.resolve(new)
    assert resolved.keys() == tied.state_dict().keys()
    assert resolved["lm_head.weight"] is resolved["model.embed_tokens.weight"]


def test_a_stale_copy_of_a_tied_weight_is_an_error(tied):
    new = qwen3(seed=1).state_dict()
    new["lm_head.weight"] = new["lm_head.weight"] + 1
    with pytest.raises(ModelError, match="tied"):
        WeightNames(tied).resolve(new)
    new["lm_head.weight"] = new["model.embed_tokens.weight"].clone()
    WeightNames(tied).resolve(new)
    # NaN is accepted here; the scheduler fails the requests.
    WeightNames(tied).resolve({name: weight * torch.nan for name, weight in new.items()})


def test_names_and_shapes_are_checked(tied):
    names = WeightNames(tied)
    new = qwen3(seed=1).state_dict()
    with pytest.raises(ModelError, match=r"base_model\.x"):
        names.resolve({**new, "base_model.x": torch.zeros(1)})
    with pytest.raises(ModelError, match=r"lack 'model\.norm\.weight'"):
        names.resolve({name: w for name, w in new.items() if name != "model.norm.weight"})
    with pytest.raises(ModelError, match=r"\(3,\).*\(32,\)"):
        names.resolve({**new, "model.norm.weight": torch.zeros(3)})


def test_copy_into_model_keeps_ties(tied):
    names = WeightNames(tied)
    new = qwen3(seed=1).state_dict()
    names.copy_into_model(names.resolve(new))
    assert all(torch.equal(w, new[name]) for name, w in tied.state_dict().items())
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    names.copy_into_model(names.resolve(tied.state_dict()))
    assert torch.equal(tied.lm_head.weight, new["lm_head.weight"])
