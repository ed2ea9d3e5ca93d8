"""Judges: they turn a finished episode into a reward."""
