"""Starting runs."""
