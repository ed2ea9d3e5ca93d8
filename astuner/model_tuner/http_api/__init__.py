"""Requests and responses of the HTTP APIs of OpenAI and Anthropic."""
