"""Tools for agents. Python code that the model writes runs in a sandbox."""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import TYPE_CHECKING, Any

from astuner.processes.episode_processes import current_episode_processes
from astuner.sandbox import run_python_program

if TYPE_CHECKING:
    from agentscope.tool import ToolResponse


async def run_python(code: str, timeout: float = 300, **kwargs: Any) -> ToolResponse:
    """Execute Python code in a sandbox, and return its return code, standard output and standard error.

    The code must print its result. It runs in a separate process without network, in an empty working directory that is
    removed afterwards. It can read the Python packages of this environment.

    Args:
        code (`str`):
            The Python code to be executed.
        timeout (`float`, defaults to `300`):
            The maximum time (in seconds) allowed for the code to run.
    """
    from agentscope.message import TextBlock
    from agentscope.tool import ToolResponse

    ended = await run_python_program(code, timeout)
    text = f"<returncode>{ended.returncode}</returncode><stdout>{ended.stdout}</stdout><stderr>{ended.stderr}</stderr>"
    return ToolResponse(content=[TextBlock(type="text", text=text)], metadata={"isolation": ended.isolation})


def sandbox_agentscope(*, enabled: bool) -> None:
    """Set whether AgentScope's `execute_python_code` runs in the sandbox when an episode calls it.

    This replaces the function's code and not the function itself, so it also applies to earlier imports of it. Its
    name, signature and docstring, which the model sees, do not change.
    """
    global _is_enabled  # noqa: PLW0603 AgentScope's function belongs to the whole process
    _is_enabled = enabled
    if _AGENTSCOPE in sys.modules:
        _replace_code(sys.modules[_AGENTSCOPE])
    elif not any(isinstance(finder, _AgentscopeFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AgentscopeFinder())


class _AgentscopeFinder(MetaPathFinder):
    """Replaces the function's code when AgentScope is imported. The import takes seconds, so it is not done earlier."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname == _AGENTSCOPE else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            _replace_code(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _replace_code(module: types.ModuleType) -> None:
    global _execute_unsandboxed  # noqa: PLW0603 AgentScope's function belongs to the whole process
    if _execute_unsandboxed is not None:
        return
    function: Any = module.execute_python_code
    _execute_unsandboxed = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__
    )

    async def execute_python_code(code: str, timeout: float = 300, **kwargs: Any) -> ToolResponse:
        from astuner.tools import _execute

        return await _execute(code, timeout, **kwargs)

    function.__code__ = execute_python_code.__code__


_AGENTSCOPE = "agentscope.tool"
_execute_unsandboxed: Any = None
_is_enabled = False


async def _execute(code: str, timeout: float, **kwargs: Any) -> ToolResponse:
    if _is_enabled and current_episode_processes() is not None:
        return await run_python(code, timeout)
    result: ToolResponse = await _execute_unsandboxed(code, timeout, **kwargs)
    return result
