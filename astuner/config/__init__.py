"""Typed configuration: sections, loading (defaults + YAML + command line) and the alias table."""
