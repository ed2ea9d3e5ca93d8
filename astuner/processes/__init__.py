"""Child processes: services under a guard, processes of episodes, the sandbox, and redacted logs."""
