"""Child processes: supervised by a guard, with redacted logs."""
