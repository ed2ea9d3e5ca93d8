"""Trinity's trainer for a Tinker server that accepts the run's `TinkerPolicy`."""

from __future__ import annotations

import os
from typing import Any

import tinker
from trinity.common.config import Config
from trinity.trainer.tinker.tinker_trainer import TinkerTrainerWrapper
from trinity.trainer.trainer import Trainer

from astuner.backbone.training.tinker_policy import POLICY_HEADER
from astuner.backbone.trinity.training_backends import POLICY_VARIABLE


class PolicyTrainer(Trainer):
    """Trinity's trainer with a client that sends the run's `TinkerPolicy` to the server."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.engine = _PolicyEngine(config)


class _PolicyEngine(TinkerTrainerWrapper):
    """Trinity's engine for Tinker. Its `prepare` sets a `service_client` that does not send the policy."""

    @property
    def service_client(self) -> Any:
        """The client that creates the models in training, and the reference model."""
        return self._service_client

    @service_client.setter
    def service_client(self, client: Any) -> None:
        client.holder.close()  # ends the session of Trinity's client
        self._service_client = tinker.ServiceClient(default_headers={POLICY_HEADER: os.environ[POLICY_VARIABLE]})
