"""The built-in agent: plays the environment of a task without an agent framework."""

from astuner.workflows.agent_loop.players import ActionReader, ScriptedPlayer

__all__ = ["ActionReader", "ScriptedPlayer"]
