"""Requests and responses for the OpenAI and Anthropic HTTP APIs."""
