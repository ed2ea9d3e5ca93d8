"""The Ray that a backbone computes on: one that is started for the run, or one that is joined."""
