"""Stub of vLLM with the names that Trinity's modules import."""
