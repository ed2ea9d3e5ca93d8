"""Launching runs from the command line and from Python."""
