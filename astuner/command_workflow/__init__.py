"""Workflows that run a program as the agent: section `workflow` of the configuration."""

from astuner.command_workflow.program import AgentProgram
from astuner.command_workflow.workflow import CommandWorkflow, command_workflow

__all__ = ["AgentProgram", "CommandWorkflow", "command_workflow"]
