"""The debug backbone: a few episodes in this process, no trainer."""
