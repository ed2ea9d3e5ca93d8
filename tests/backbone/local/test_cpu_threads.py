"""The number of threads follows the cores that other processes leave idle."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest
import torch

from astuner.backbone.local.backbone import SpareCores

BUSY = "import time; end = time.monotonic() + 20\nwhile time.monotonic() < end: pass"


@pytest.mark.skipif((psutil.cpu_count() or 1) < 2, reason="needs two cores")
def test_busy_processes_take_cores_away():
    before = torch.get_num_threads()
    torch.set_num_threads(psutil.cpu_count() or 1)
    # Started from a shell that ends at once, so that they are not this process's children.
    command = f"for i in $(seq {psutil.cpu_count()}); do {sys.executable} -c '{BUSY}' >/dev/null 2>&1 & echo $!; done"
    started = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True).stdout.split()
    try:
        cores = SpareCores()
        time.sleep(1.0)
        cores.adapt_threads()
        assert torch.get_num_threads() == 1
    finally:
        for pid in started:
            psutil.Process(int(pid)).kill()
        torch.set_num_threads(before)


def test_never_more_than_at_the_start(monkeypatch: pytest.MonkeyPatch):
    before = torch.get_num_threads()
    cores = SpareCores()
    monkeypatch.setattr(psutil, "cpu_count", lambda: 512)
    for _ in range(3):
        time.sleep(0.3)
        cores.adapt_threads()
    assert torch.get_num_threads() == before
