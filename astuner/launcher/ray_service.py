"""The service of `--with-ray` and `--with-ray-cluster`."""

from __future__ import annotations

from astuner.backbone.ray_cluster.head import READY_TEXT, ray_head
from astuner.backbone.ray_cluster.temp_dir import short_parent
from astuner.config.root import AstunerConfig
from astuner.config.services import HealthConfig, ServiceConfig
from astuner.launcher.built_in_services import BuiltInService
from astuner.processes.guarded_process import TempDir


def ray_service(config: AstunerConfig, *, others_join: bool) -> BuiltInService:
    """Return the Ray head of a run.

    Args:
        config: the resolved configuration.
        others_join: whether nodes on other machines may join.
    """
    head = ray_head(config, others_join=others_join)
    service = ServiceConfig(command=head.argv, env=dict(head.env), health=HealthConfig(port=head.port))
    temp_dir = TempDir(str(short_parent()), ("TMPDIR", "RAY_TMPDIR"))
    return BuiltInService(service, "ray", '`pip install "ray[default]"`', temp_dir, head.ray, READY_TEXT)
