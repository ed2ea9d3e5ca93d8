"""Tasks that are made: from traces of deployed agents, and from documents."""
