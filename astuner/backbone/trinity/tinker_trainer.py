"""Trinity's trainer with a Tinker server that takes the policy of the run (`TinkerPolicy`)."""

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
    """The stock trainer, except that its client sends the policy of the run to the server."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.engine = _PolicyEngine(config)


class _PolicyEngine(TinkerTrainerWrapper):
    """The stock engine. Its `prepare` sets `service_client` to a client that cannot send the policy."""

    @property
    def service_client(self) -> Any:
        """The client that creates the models in training, and the reference model."""
        return self._service_client

    @service_client.setter
    def service_client(self, client: Any) -> None:
        client.holder.close()  # ends the session that the stock client opened
        self._service_client = tinker.ServiceClient(default_headers={POLICY_HEADER: os.environ[POLICY_VARIABLE]})
