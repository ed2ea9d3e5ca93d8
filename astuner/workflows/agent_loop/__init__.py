"""The built-in agent: plays the environment of a task without an agent framework."""

from astuner.workflows.agent_loop.players import (
    ActionForm,
    ActionReader,
    ModelPlayer,
    Player,
    RandomPlayer,
    ScriptedPlayer,
    UnreadableActionError,
    load_player,
)
from astuner.workflows.agent_loop.workflow import EnvWorkflow, LoopSettings, environment_workflow

__all__ = [
    "ActionForm",
    "ActionReader",
    "EnvWorkflow",
    "LoopSettings",
    "ModelPlayer",
    "Player",
    "RandomPlayer",
    "ScriptedPlayer",
    "UnreadableActionError",
    "environment_workflow",
    "load_player",
]
