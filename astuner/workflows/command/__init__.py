"""Workflows that run a program as the agent: section `workflow` of the configuration."""
