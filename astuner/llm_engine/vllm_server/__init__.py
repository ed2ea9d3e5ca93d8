"""A local vLLM server that astuner starts: detection of vLLM, server settings, start and stop, and warm servers."""
