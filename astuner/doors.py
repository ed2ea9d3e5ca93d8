"""The optional parts of astuner, and the one way into them.

The core is what a run with an ordinary workflow, a file of tasks and a judge by rules needs. Every other part is named
in `DOORS` and imported when a run uses it. import-linter forbids the core to import these parts directly.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

DOORS: Mapping[str, Mapping[str, str]] = {
    "backbone": {
        "debug": "astuner.backbone.debug.backbone:DebugBackbone",
        "local": "astuner.backbone.local.backbone:LocalBackbone",
        "verl": "astuner.backbone.verl.backbone:VerlBackbone",
        "trinity": "astuner.backbone.trinity.backbone:TrinityBackbone",
    },
    "command": {
        "bench": "astuner.cli.bench:bench",
        "bisect": "astuner.cli.show:bisect",
        "chat": "astuner.cli.serve:chat",
        "check": "astuner.cli.setup:check",
        "completion": "astuner.cli.setup:completion",
        "doctor": "astuner.cli.setup:doctor",
        "env": "astuner.cli.env:env",
        "explain": "astuner.cli.show:explain",
        "export": "astuner.cli.show:export",
        "generate": "astuner.cli.data:generate",
        "init": "astuner.cli.setup:init",
        "install": "astuner.cli.setup:install",
        "replay": "astuner.cli.show:replay",
        "rescore": "astuner.cli.show:rescore",
        "runs": "astuner.cli.show:runs",
        "serve": "astuner.cli.serve:serve",
        "serve-tinker": "astuner.cli.serve:serve_tinker",
        "stop-engine": "astuner.cli.serve:stop_engine",
        "trace": "astuner.cli.data:trace",
        "view": "astuner.cli.show:view",
    },
    "workflow": {
        "command": "astuner.workflows.command.workflow:command_workflow",
        "environment": "astuner.workflows.agent_loop.workflow:environment_workflow",
    },
    "tasks": {
        "data_generation": "astuner.task_sources.data_generation:generation_files",
        "env_service": "astuner.task_reader.env_service:env_splits",
        "feedback_tracing": "astuner.task_sources.tracing.convert:tracing_files",
        "filters": "astuner.task_reader.filters:apply_filters",
        "huggingface_dat_repo": "astuner.task_reader.huggingface_dat_repo:repo_splits",
    },
    "judge": {
        "learned_rubrics": "astuner.task_judge.rubrics_auto_grader.learning:load_or_learn_rubrics",
        "rubrics_grader": "astuner.task_judge.rubrics_auto_grader.grader:make_grader",
    },
    "engine": {
        "completions": "astuner.llm_engine.completions:CompletionsEngine",
        "vllm": "astuner.llm_engine.vllm_server.vllm_process:vllm_engine",
    },
    "installed": {"enter": "astuner.installer.reexec:enter_environment"},
    "ray": {
        "on_loopback": "astuner.backbone.ray_cluster.environment:on_loopback",
        "service": "astuner.launcher.ray_service:ray_service",
    },
    "teacher": {
        "load": "astuner.algorithms.distillation.distiller:load_distiller",
        "model": "astuner.algorithms.distillation.teachers:ModelTeacher",
    },
    "loop": {"supervised": "astuner.backbone.local.supervised:SupervisedLoop"},
    "record": {
        "plots": "astuner.run_record.plots:plot_run",
        "result": "astuner.launcher.run_result:print_result",
    },
    "memory": {
        "debug": "astuner.backbone.debug.memory:estimate_memory",
        "local": "astuner.backbone.local.memory:estimate_training_memory",
    },
    "episodes": {
        "here": "astuner.backbone.training.agent:load_agent",
        "job": "astuner.backbone.episode_workers.messages:AgentJob",
        "processes": "astuner.backbone.episode_workers.pool:started_pool",
    },
    "environment": {"client": "astuner.env_service.client:EnvServiceClient"},
    "diagnostics": {
        "logprob_gap": "astuner.diagnostics.logprob_gap:explain_logprob_gap",
        "monitor": "astuner.diagnostics.monitor:Monitor",
    },
}
"""By kind and name: `module:object` of an optional part."""


def through_door(kind: str, name: str) -> Any:
    """Import the optional part `DOORS[kind][name]` and return its object.

    Raises:
        KeyError: there is no such part.
        ImportError: a package that the part needs is not installed.
    """
    module, _, attribute = DOORS[kind][name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def lazy_names(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a package's `__getattr__` (PEP 562), which imports a public name from its module on first use."""

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(modules[name]), name)

    return get
