"""Runs one episode: workflow, then judge."""
