"""Processes that astuner starts beside itself: their end, their output, their ports."""
