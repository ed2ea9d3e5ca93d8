"""What is read from recorded runs: explanations, comparisons, new scores and benchmarks."""
