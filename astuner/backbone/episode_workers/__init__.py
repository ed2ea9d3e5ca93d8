"""Processes that run episodes."""
