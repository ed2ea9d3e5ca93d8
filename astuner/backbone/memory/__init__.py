"""A run's memory: its estimate, and the plan of a described machine."""
