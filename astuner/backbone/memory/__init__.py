"""The memory of a run: its estimate, the plan of a machine, and saved activations."""
