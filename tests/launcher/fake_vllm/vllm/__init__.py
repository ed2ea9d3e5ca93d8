"""Stands in for vLLM where that is not installed."""
