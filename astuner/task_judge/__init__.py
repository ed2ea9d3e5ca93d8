"""Judges, which compute the reward of a finished episode."""
