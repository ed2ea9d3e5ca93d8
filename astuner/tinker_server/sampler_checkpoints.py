"""The training runs' sampler checkpoints; only the recently used ones are kept."""

from __future__ import annotations

from loguru import logger

from astuner.tinker_server.checkpoints import CheckpointStore, TinkerCheckpoint
from astuner.tinker_server.sampling import SamplerPool


class SamplerCheckpoints:
    """Records the use of sampler checkpoints, and deletes the least recently used ones beyond a limit."""

    def __init__(self, store: CheckpointStore, samplers: SamplerPool, limit: int) -> None:
        """Start without any recorded use.

        Args:
            store: the checkpoints.
            samplers: the samplers that may be using a checkpoint.
            limit: maximum number of sampler checkpoints per training run.
        """
        self._store, self._samplers, self._limit = store, samplers, limit
        # By path, the number of the request that used the checkpoint last.
        self._last_use: dict[str, int] = {}
        self._use_count = 0

    def record_use(self, checkpoint: TinkerCheckpoint) -> None:
        """Record that a request uses the checkpoint."""
        self._use_count += 1
        self._last_use[checkpoint.path] = self._use_count

    def delete_old(self, run_id: str) -> None:
        """Delete the least recently used sampler checkpoints of a training run beyond the limit."""
        checkpoints = self._store.checkpoints(run_id)
        snapshots = [checkpoint for checkpoint in checkpoints if checkpoint.kind == "sampler_weights"]
        by_use = sorted(snapshots[:-1], key=lambda item: (self._last_use.get(item.path, 0), item.time))
        for snapshot in by_use[: max(0, len(snapshots) - self._limit)]:
            if not self._samplers.is_in_use(snapshot.path):
                level = "DEBUG" if snapshot.ephemeral else "INFO"
                message = "{} is deleted to make room for newer sampler weights (--max-samplers {})"
                logger.log(level, message, snapshot.path, self._limit)
                self.delete(snapshot)

    def delete(self, checkpoint: TinkerCheckpoint) -> None:
        """Delete a checkpoint."""
        self._store.delete(checkpoint)
        self.forget(checkpoint.path)

    def forget(self, path: str) -> None:
        """Forget the use of a checkpoint that was deleted."""
        self._last_use.pop(path, None)
