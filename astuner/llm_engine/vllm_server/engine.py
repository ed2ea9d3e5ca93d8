"""An engine that samples from a vLLM server, which it starts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from astuner.config.root import AstunerConfig
from astuner.llm_engine.completions import CompletionsEngine
from astuner.llm_engine.vllm_server.installation import installed_vllm
from astuner.llm_engine.vllm_server.settings import settings_for
from astuner.llm_engine.vllm_server.vllm_process import vllm_server


@contextlib.contextmanager
def vllm_engine(config: AstunerConfig, model_path: str, folder: Path, keep: bool) -> Iterator[CompletionsEngine]:
    """Start a vLLM server, and yield an engine that samples from it.

    Args:
        config: the resolved configuration.
        model_path: folder or Hugging Face name of the model.
        folder: the run's record, which gets the server's log.
        keep: whether the server keeps running for later runs.

    Raises:
        BackboneError: vLLM is not installed.
        ServiceError: the server does not become ready.
    """
    settings = settings_for(config, model_path, installed_vllm())
    timeout = config.debug.debug_vllm_timeout
    with vllm_server(settings, folder, timeout, keep=keep):
        yield CompletionsEngine.connect(
            f"{settings.address}/v1",
            model=settings.name,
            default_model=settings.name,
            max_model_len=settings.max_model_len,
            api_key=None,
            launched=True,
            timeout=timeout,
        )
