"""Reads the tasks of an environment service."""

from __future__ import annotations

from dataclasses import replace

from astuner.config.data import EnvServiceConfig
from astuner.env_service.addresses import EnvServiceAddress, service_address
from astuner.env_service.client import EnvServiceClient
from astuner.errors import EnvError, TaskDataError
from astuner.schema import EnvTask, Task


def env_splits(config: EnvServiceConfig, key: str, started: EnvServiceAddress | None) -> tuple[list[Task], list[Task]]:
    """Return the training and validation tasks of an environment, in its order.

    Args:
        started: the service that the run has started, for `env_url: auto`.

    Raises:
        TaskDataError: the service cannot be reached, or lacks the environment or a split, or tasks share an id.
    """
    client = EnvServiceClient(service_address(config.env_url, started))
    try:
        validation = config.validation_split
        return (
            _tasks(client, config, config.training_split),
            [] if validation is None else _tasks(client, config, validation),
        )
    except EnvError as error:
        raise TaskDataError(f"{key}: {error}") from error
    finally:
        client.close()


def _tasks(client: EnvServiceClient, config: EnvServiceConfig, split: str) -> list[Task]:
    source = EnvTask(config.env_type, split, "", config.env_params, config.env_action_preference, config.env_url)
    tasks: dict[str, Task] = {}
    for profile in client.tasks(source):
        if profile.task_id in tasks:
            raise EnvError(f"split {split!r} of {config.env_type} has several tasks with the id {profile.task_id!r}")
        tasks[profile.task_id] = Task(
            profile.task_id,
            profile.main_query,
            profile.init_messages,
            profile.metadata,
            config.env_type,
            replace(source, task_id=profile.task_id),
        )
    return list(tasks.values())
