"""Workflows that run a program as the agent: section `workflow` of the configuration."""

from astuner.workflows.command.program import AgentProgram
from astuner.workflows.command.workflow import CommandWorkflow, command_workflow

__all__ = ["AgentProgram", "CommandWorkflow", "command_workflow"]
