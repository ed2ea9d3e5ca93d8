"""Runs programs that a model has written, with limits, and without access to the files and the network of the host."""

from astuner.sandbox.program import SandboxLimits, SandboxResult, run_program, run_python_program
from astuner.sandbox.shell import ShellSandbox

__all__ = ["SandboxLimits", "SandboxResult", "ShellSandbox", "run_program", "run_python_program"]
