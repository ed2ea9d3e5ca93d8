"""Child processes: services under a guard, processes of episodes, and redacted logs."""
