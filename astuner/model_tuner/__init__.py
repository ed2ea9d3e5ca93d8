"""The chat model that is trained: rendering, sampling, parsing and recording of its calls."""
