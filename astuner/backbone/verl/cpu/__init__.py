"""verl without a GPU: a CPU platform, the embedded engine as a rollout engine, and vLLM's build for CPUs."""
