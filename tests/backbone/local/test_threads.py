"""The number of threads, and that it is put back."""

from __future__ import annotations

import torch

from astuner.backbone.local.threads import threads_for


def test_small_models_on_the_cpu_take_one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with threads_for(1_000_000, torch.device("cpu")):
            assert torch.get_num_threads() == 1
        for parameters, device in ((10_000_000, "cpu"), (1_000_000, "cuda")):
            with threads_for(parameters, torch.device(device)):
                assert torch.get_num_threads() == 2
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
