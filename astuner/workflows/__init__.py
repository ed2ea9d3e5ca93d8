"""Ready workflows: the built-in agent loop, and programs as agents."""
