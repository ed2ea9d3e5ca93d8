"""A vLLM server that astuner starts: what it is started with, its start and end, and one that is kept warm."""
