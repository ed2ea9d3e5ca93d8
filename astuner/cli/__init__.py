"""The `astuner` command."""
