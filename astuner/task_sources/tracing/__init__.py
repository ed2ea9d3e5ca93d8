"""Reads traces from deployed agents, with their users' feedback, and converts them to training data."""
