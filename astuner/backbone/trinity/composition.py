"""From a run's configuration to Trinity's."""

from __future__ import annotations

from typing import Any

from astuner.backbone.step_credit import uses_kl_loss
from astuner.backbone.trinity.plan import TrinityPlan
from astuner.config.root import RunConfig

PROJECT, NAME = "astuner", "run"
"""Trinity keeps its state in `{checkpoint_root_dir}/astuner/run`."""

_HERE = "astuner.backbone.trinity"
# A day: astuner has deadlines of its own, and says which part is late.
_LONG = 86_400


def compose_trinity_config(config: RunConfig, plan: TrinityPlan) -> dict[str, Any]:
    """Return Trinity's `Config` as a nested mapping.

    A trainer step of Trinity's is one optimiser step, of which astuner's step has `mini_batch_num`.
    """
    run = config.astuner
    common, updates = run.trainer_common, run.trainer_common.mini_batch_num
    taskset = {
        "storage_type": f"{_HERE}.reader.TrainingReader",
        "name": "training",
        "path": "astuner",
        "default_workflow_type": f"{_HERE}.workflow.EpisodeWorkflow",
    }
    validation = {**taskset, "storage_type": f"{_HERE}.reader.RequestReader", "name": "request"}
    return {
        "mode": plan.mode,
        "project": PROJECT,
        "group": "",
        "name": NAME,
        "checkpoint_root_dir": str(plan.checkpoint_root_dir),
        "continue_from_checkpoint": True,
        "ray_namespace": plan.namespace,
        "ignore_validator_suggestions": True,
        "algorithm": {
            "algorithm_type": "multi_step_grpo",
            "repeat_times": run.rollout.num_repeat,
            "advantage_fn": f"{_HERE}.credit.EpisodeAdvantages",
            "advantage_fn_args": {},
            "sample_strategy": f"{_HERE}.mini_batches.WholeMiniBatches",
            "sample_strategy_args": {"updates": updates},
            "policy_loss_fn": f"{_HERE}.loss.EpisodeLoss",
            "policy_loss_fn_args": {
                "algorithm": common.algorithm.model_dump(mode="json"),
                "kl_coef": common.kl_loss_coef if uses_kl_loss(run) else 0.0,
                "kl_type": common.kl_loss_type,
            },
            "kl_loss_fn": "none",
            "kl_penalty_fn": "none",
            "entropy_loss_fn": "none",
            "loss_agg_mode": "seq-mean-token-sum",
            "optimizer": {
                "lr": common.optim.lr,
                "betas": list(common.optim.betas),
                "weight_decay": common.optim.weight_decay,
                "lr_scheduler_type": common.optim.lr_scheduler,
                "lr_warmup_steps": common.optim.lr_warmup_steps * updates,
                "min_lr_ratio": common.optim.min_lr_ratio,
            },
        },
        "model": {
            "model_path": plan.model_path,
            "max_model_len": plan.max_model_len,
            "max_response_tokens": min(run.rollout.max_response_length_in_one_turn, plan.max_model_len - 1),
            "enable_prompt_truncation": False,
            "tinker": {
                "enable": plan.tinker_base_url is not None,
                "base_url": plan.tinker_base_url,
                "rank": run.model.lora.rank,
                "seed": common.seed,
            },
        },
        "cluster": {"node_num": 1, "gpu_per_node": 8},
        "buffer": {
            "batch_size": run.data.train_batch_size,
            "train_batch_size": run.data.train_batch_size * run.rollout.num_repeat,
            "total_steps": plan.total_steps,
            "explorer_input": {"taskset": taskset, "eval_tasksets": [validation]},
            # Experiences stay in memory: this path is none that Trinity would write them to.
            "trainer_input": {
                "experience_buffer": {
                    "name": "experiences",
                    "storage_type": "queue",
                    "path": "memory",
                    "max_read_timeout": _LONG,
                }
            },
        },
        "explorer": {
            "eval_on_startup": False,
            "eval_interval": _LONG,
            "concurrent_mode": "sequential",
            "runner_per_model": plan.runners,
            "max_timeout": _LONG,
            "max_retry_times": 0,
            "runner_state_report_interval": 0,
            "rollout_model": {"engine_num": 1, "enable_history": False, "enable_openai_api": True},
        },
        "trainer": {
            "save_interval": common.save_freq * updates,
            "total_steps": plan.total_steps * updates,
            "grad_clip": common.optim.grad_clip,
            "enable_preview": False,
            "save_hf_checkpoint": "last",
            "fix_actor_microbatch_loss_scale": False,
        },
        "synchronizer": {
            "sync_method": "memory",
            "sync_style": "explorer_driven",
            "sync_interval": 1,
            "sync_timeout": _LONG,
        },
        "monitor": {"monitor_type": f"{_HERE}.monitor.DeskMonitor"},
        "log": {"level": "INFO"},
    }
