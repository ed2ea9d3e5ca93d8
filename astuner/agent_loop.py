"""The former import path of `astuner.workflows.agent_loop`."""

from astuner.workflows.agent_loop import ActionReader, ScriptedPlayer

__all__ = ["ActionReader", "ScriptedPlayer"]
