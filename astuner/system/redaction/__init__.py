"""Redaction of secrets in everything that a run writes and prints."""
