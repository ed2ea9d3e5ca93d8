"""The former import path of `astuner.workflows.agent_loop`."""

from astuner.workflows.agent_loop.players import ActionReader, ScriptedPlayer

__all__ = ["ActionReader", "ScriptedPlayer"]
