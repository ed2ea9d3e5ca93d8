"""Checks and notices about the values of a configuration, from the keys' declarations and across keys."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from astuner.config.algorithms import ALGORITHMS
from astuner.config.correction_checks import correction_problems
from astuner.config.data import part_names
from astuner.config.distillation_checks import distillation_problems
from astuner.config.keys import KeyPath, dotted, is_changed, parts, schema, value_at
from astuner.config.problems import Problem
from astuner.config.root import AstunerConfig, RunConfig

_MAX_EPISODES = 1_000_000


def unsupported_values(config: RunConfig) -> Iterator[Problem]:
    """Yield the values that the configuration's backbone does not support."""
    backbone = config.astuner.backbone
    for path, key in schema().keys.items():
        value = value_at(config, path)
        for declared in key.unsupported:
            rejected = is_changed(config, path) if declared.values is None else value in declared.values
            if declared.is_error and backbone in declared.by and rejected:
                text = f"{dotted(path)} is {value!r}, which --backbone={backbone} does not support: {declared.why}"
                yield Problem(text, keys=(path,))


def values_set_aside(config: RunConfig) -> Iterator[str]:
    """Yield a notice for each value that only other backbones use; `keys_without_effect` lists keys without effect."""
    backbone = config.astuner.backbone
    for path, key in schema().keys.items():
        if any(condition.holds(config.astuner) for condition in key.no_effect):
            continue
        value = value_at(config, path)
        for declared in key.unsupported:
            if not declared.is_error and backbone in declared.by and value in (declared.values or ()):
                yield f"{dotted(path)}: {value} is set aside: {declared.why}"


def ignored_keys(config: RunConfig) -> Iterator[str]:
    """Yield at most one notice, which lists the changed keys that the backbone does not use."""
    backbone = config.astuner.backbone
    unused = [
        dotted(path) for path, key in schema().keys.items() if backbone not in key.used_by and is_changed(config, path)
    ]
    if unused:
        yield f"not used by {backbone}: {', '.join(unused)}"


def keys_without_effect(config: RunConfig, set_keys: Collection[KeyPath] = ()) -> Iterator[str]:
    """Yield a notice for each condition, which lists the keys that have no effect under it.

    A key is listed under the first of its conditions that holds, if it is changed. A key in `set_keys`, which the user
    set, is listed at its default, too, if the condition says so.
    """
    keys: dict[str, list[str]] = {}
    for path, key in schema().keys.items():
        if path in set_keys or is_changed(config, path):
            condition = next((when for when in key.no_effect if when.holds(config.astuner)), None)
            if condition is not None and (condition.at_default or is_changed(config, path)):
                keys.setdefault(condition.text, []).append(dotted(path))
    for text, names in keys.items():
        yield f"no effect {text}: {', '.join(names)}"


def inconsistencies(config: RunConfig) -> Iterator[Problem]:
    """Yield the required values that are missing and the contradictions between keys."""
    run = config.astuner
    yield from _missing(run)
    yield from _task_selection(run)
    yield from _wrong_for_algorithm(config)
    yield from _devices(run)
    if run.trainer_common.algorithm.adv_estimator != "sft":  # sft does no rollouts
        yield from _lengths(run)
        yield from _batches(run)
        yield from _targets(run)
        yield from _agent_loop(run)
        yield from _staleness(run)
        yield from _rubric_scores(run)
        yield from correction_problems(run)
        yield from distillation_problems(run)


def _problem(text: str, *keys: str) -> Problem:
    return Problem(text, keys=tuple(parts(key) for key in keys))


def _missing(run: AstunerConfig) -> Iterator[Problem]:
    if not run.model.path:
        yield _problem(
            "the model to train is missing; add `path: Qwen/Qwen2.5-7B-Instruct` under `astuner:`, `model:`",
            "astuner.model.path",
        )
    supervised = run.trainer_common.algorithm.adv_estimator == "sft"
    is_loop = not run.rollout.use_agentscope_protocol
    if not supervised and not is_loop and not run.rollout.agentscope_workflow and run.workflow.command is None:
        yield _problem(
            "the workflow to tune is missing; add `agentscope_workflow: package.module->Class` under `astuner:`, "
            "`rollout:`, or `command: [python, my_agent.py]` under `astuner:`, `workflow:`, or "
            "`use_agentscope_protocol: False` under `rollout:` to play environments without a workflow",
            "astuner.rollout.agentscope_workflow",
            "astuner.workflow.command",
        )
    if not supervised and run.rollout.agentscope_workflow and run.workflow.command is not None:
        yield _problem(
            f"astuner.rollout.agentscope_workflow ({run.rollout.agentscope_workflow}) and astuner.workflow.command "
            "both name the agent; remove one of them",
            "astuner.rollout.agentscope_workflow",
            "astuner.workflow.command",
        )
    if run.task_reader.type == "dataset_file" and not run.task_reader.dataset_file.training.file_path:
        yield _problem(
            "task_reader.type is dataset_file and no file is named; add `file_path: tasks.jsonl` under `astuner:`, "
            "`task_reader:`, `dataset_file:`, `training:`",
            "astuner.task_reader.dataset_file.training.file_path",
        )
    if run.task_reader.type == "mixture" and not run.task_reader.mixture:
        yield _problem(
            "task_reader.type is mixture and no reader is named; add entries such as "
            "`- {type: dataset_file, weight: 1.0, dataset_file: {training: {file_path: tasks.jsonl}}}` under "
            "`astuner:`, `task_reader:`, `mixture:`",
            "astuner.task_reader.mixture",
        )


def _task_selection(run: AstunerConfig) -> Iterator[Problem]:
    reader = run.task_reader
    names = part_names(reader.mixture)
    for index, (part, name) in enumerate(zip(reader.mixture, names, strict=True)):
        if part.type == "dataset_file" and not part.dataset_file.training.file_path:
            yield _problem(
                f"astuner.task_reader.mixture.{index} has type dataset_file and no dataset_file.training.file_path; "
                "set it to the path of a file",
                "astuner.task_reader.mixture",
            )
        if name in names[:index]:
            yield _problem(
                f"two entries of astuner.task_reader.mixture have the name {name!r}; give each its own name, because "
                "task ids begin with it",
                "astuner.task_reader.mixture",
            )
    difficulties = sum(entry.type == "difficulty" for entry in reader.filters)
    if difficulties > 1:
        yield _problem(
            f"astuner.task_reader.filters has {difficulties} filters of type difficulty; expected at most one, because "
            "it acts during training",
            "astuner.task_reader.filters",
        )
    if run.trainer_common.algorithm.adv_estimator != "sft":
        return
    used = {"filters": difficulties, "curriculum": reader.curriculum.enable}
    for name in (name for name, is_used in used.items() if is_used):
        what = "a filter of type difficulty" if name == "filters" else "the curriculum"
        yield _problem(
            f"{what} (astuner.task_reader.{name}) depends on the success of episodes, and algorithm sft has none; "
            "remove it",
            f"astuner.task_reader.{name}",
            "astuner.trainer_common.algorithm.adv_estimator",
        )


def _wrong_for_algorithm(config: RunConfig) -> Iterator[Problem]:
    algorithm = config.astuner.trainer_common.algorithm.adv_estimator
    for path, key in schema().keys.items():
        reason = key.rules[-1].wrong_for.get(algorithm)
        if reason and is_changed(config, path):
            yield _problem(
                f"{dotted(path)} is {value_at(config, path)}, and algorithm {algorithm} has no use for it: {reason}. "
                "Remove the key or choose another algorithm",
                dotted(path),
                "astuner.trainer_common.algorithm.adv_estimator",
            )


def _rubric_scores(run: AstunerConfig) -> Iterator[Problem]:
    grader, section = run.task_judge.rubrics_auto_grader, "astuner.task_judge.rubrics_auto_grader"
    if not run.task_judge.learns_rubrics:
        return
    if grader.min_score >= grader.max_score:
        yield _problem(
            f"{section}.min_score is {grader.min_score:g}, expected a value below max_score, which is "
            f"{grader.max_score:g}",
            f"{section}.min_score",
            f"{section}.max_score",
        )
    elif not grader.min_score <= grader.success_threshold <= grader.max_score:
        yield _problem(
            f"{section}.success_threshold is {grader.success_threshold:g}, expected a value from min_score to "
            f"max_score ({grader.min_score:g} to {grader.max_score:g})",
            f"{section}.success_threshold",
        )


def _devices(run: AstunerConfig) -> Iterator[Problem]:
    common = run.trainer_common
    gpus = (common.n_gpus_per_node or 1) * common.nnodes
    if run.backbone == "local" and gpus > 1:
        yield _problem(
            f"astuner.trainer_common.n_gpus_per_node (n_gpu of AstunerJob) × nnodes is {gpus}, and --backbone=local "
            "trains on one device; remove both keys, or use --backbone=trinity or --backbone=verl",
            "astuner.trainer_common.n_gpus_per_node" if common.nnodes == 1 else "astuner.trainer_common.nnodes",
            "astuner.trainer_common.n_gpus_per_node",
        )


def _lengths(run: AstunerConfig) -> Iterator[Problem]:
    rollout = run.rollout
    buffer = run.trainer_common.algorithm.overlong_buffer_length
    if buffer > run.data.max_response_length:
        yield _problem(
            f"astuner.trainer_common.algorithm.overlong_buffer_length ({buffer}) is more than "
            f"astuner.data.max_response_length ({run.data.max_response_length}), whose last tokens it covers; lower "
            "the first or raise the second",
            "astuner.trainer_common.algorithm.overlong_buffer_length",
            "astuner.data.max_response_length",
        )
    if rollout.max_response_length_in_one_turn > rollout.max_model_len:
        yield _problem(
            f"astuner.rollout.max_response_length_in_one_turn ({rollout.max_response_length_in_one_turn}) is more "
            f"than astuner.rollout.max_model_len ({rollout.max_model_len}), which limits prompt and answer together; "
            "lower the first or raise the second",
            "astuner.rollout.max_response_length_in_one_turn",
            "astuner.rollout.max_model_len",
        )


def _batches(run: AstunerConfig) -> Iterator[Problem]:
    rollout, trainer = run.rollout, run.trainer_common
    episodes = run.data.train_batch_size * rollout.num_repeat
    if trainer.mini_batch_num > episodes:
        yield _problem(
            f"astuner.trainer_common.mini_batch_num ({trainer.mini_batch_num}) is more than the episodes of a step: "
            f"astuner.data.train_batch_size ({run.data.train_batch_size}) × astuner.rollout.num_repeat "
            f"({rollout.num_repeat}) = {episodes}; lower the first or raise one of the others",
            "astuner.trainer_common.mini_batch_num",
            "astuner.data.train_batch_size",
            "astuner.rollout.num_repeat",
        )
    elif trainer.mini_batch_by == "group" and trainer.mini_batch_num > run.data.train_batch_size:
        yield _problem(
            f"astuner.trainer_common.mini_batch_num ({trainer.mini_batch_num}) is more than the groups of a step: "
            f"astuner.data.train_batch_size is {run.data.train_batch_size}, and with mini_batch_by: group, no group is "
            "divided; lower the first, raise the second, or write mini_batch_by: episode",
            "astuner.trainer_common.mini_batch_num",
            "astuner.data.train_batch_size",
            "astuner.trainer_common.mini_batch_by",
        )
    if episodes > _MAX_EPISODES:
        yield _problem(
            f"a step has astuner.data.train_batch_size ({run.data.train_batch_size:,}) × astuner.rollout.num_repeat "
            f"({rollout.num_repeat:,}) = {episodes:,} episodes; expected at most {_MAX_EPISODES:,}, because a step's "
            "episodes are in memory together; lower one of them",
            "astuner.data.train_batch_size",
            "astuner.rollout.num_repeat",
        )
    algorithm = trainer.algorithm.adv_estimator
    reinforcement = ALGORITHMS[algorithm].reinforcement
    if reinforcement is not None and reinforcement.advantage.compares_group and rollout.num_repeat < 2:
        yield _problem(
            f"{algorithm} compares the episodes of one task, so astuner.rollout.num_repeat must be at least 2, "
            f"and it is {rollout.num_repeat}",
            "astuner.rollout.num_repeat",
            "astuner.trainer_common.algorithm.adv_estimator",
        )


def _targets(run: AstunerConfig) -> Iterator[Problem]:
    trainable, frozen = run.rollout.trainable_targets, run.rollout.frozen_models
    if trainable is not None and not trainable:
        yield _problem(
            "rollout.trainable_targets is empty, so nothing would be trained; name the targets to train, or write "
            "null to train all",
            "astuner.rollout.trainable_targets",
        )
    for tag, model in frozen.items():
        key = "astuner.rollout.frozen_models"
        if trainable is None or tag in trainable:
            yield _problem(
                f"rollout.frozen_models names a model for {tag!r}, which is trained; remove it, or list in "
                "rollout.trainable_targets only the targets to train",
                key,
                "astuner.rollout.trainable_targets",
            )
        if (model.base_url is None) != (model.model in ("policy", "starting_model")):
            yield _problem(
                f"rollout.frozen_models.{tag} has model {model.model!r} and base_url {model.base_url!r}; write both to "
                "use an endpoint, neither to use the model in training, or only `model: starting_model` to use its "
                "weights at the start of the run",
                key,
            )
        elif model.model == "starting_model" and run.backbone in ("trinity", "verl"):
            yield _problem(
                f"rollout.frozen_models.{tag} is the starting model, which {run.backbone} does not keep for sampling; "
                "use backbone local, or serve the model at an endpoint and write its base_url",
                key,
            )


def _agent_loop(run: AstunerConfig) -> Iterator[Problem]:
    rollout = run.rollout
    protocol = "astuner.rollout.use_agentscope_protocol"
    if rollout.use_agentscope_protocol:
        if rollout.gamma != 1:
            yield _problem(
                f"astuner.rollout.gamma is {rollout.gamma:g}, and only the built-in agent loop "
                "(rollout.use_agentscope_protocol: False) knows the rewards of steps; write 1.0 or remove the line",
                "astuner.rollout.gamma",
                protocol,
            )
        return
    agents = {
        "astuner.rollout.agentscope_workflow": rollout.agentscope_workflow,
        "astuner.workflow.command": run.workflow.command,
    }
    for name, agent in agents.items():
        if agent:
            yield _problem(
                f"{protocol} is False, which plays the environment with the built-in agent loop, and {name} names "
                "another agent; remove one of the two lines",
                name,
                protocol,
            )
    if run.task_reader.type not in ("env_service", "mixture") and "->" not in run.task_reader.type:
        yield _problem(
            f"{protocol} is False, which plays the environment of each task, and the tasks of task_reader.type "
            f"{run.task_reader.type} have no environment; write `type: env_service`, or name a workflow in "
            "agentscope_workflow",
            "astuner.task_reader.type",
            protocol,
        )
    yield from _agent_loop_settings(run)


def _agent_loop_settings(run: AstunerConfig) -> Iterator[Problem]:
    rollout, history = run.rollout, run.context_tracker
    for seat in rollout.players:
        for name, seats in (("trainable_targets", rollout.trainable_targets), ("frozen_models", rollout.frozen_models)):
            if seat in (seats or ()):
                yield _problem(
                    f"rollout.players has a program for {seat!r}, and rollout.{name} names {seat!r} as a seat of a "
                    "model; remove one of the two",
                    "astuner.rollout.players",
                    f"astuner.rollout.{name}",
                )
    if rollout.action_form == "tool_call" and rollout.agentscope_disable_toolcalls:
        yield _problem(
            "astuner.rollout.action_form is tool_call, and astuner.rollout.agentscope_disable_toolcalls hides tools "
            "from the model; remove one of the two lines",
            "astuner.rollout.agentscope_disable_toolcalls",
            "astuner.rollout.action_form",
        )
    if run.task_judge.judge_protocol and (rollout.step_rewards != "sum" or rollout.gamma != 1):
        changed = "step_rewards" if rollout.step_rewards != "sum" else "gamma"
        yield _problem(
            f"astuner.rollout.{changed} is {getattr(rollout, changed)}, which is about the rewards of the "
            "environment's steps, and astuner.task_judge.judge_protocol replaces them with one score; remove one of "
            "the two lines",
            f"astuner.rollout.{changed}",
            "astuner.task_judge.judge_protocol",
        )
    room = rollout.max_model_len - history.alien_llm_response_length
    own = history.context_tracker_type == "auto_context" and history.auto_context_cm.base_url is None
    if own and history.max_env_len >= room:
        yield _problem(
            f"astuner.context_tracker.max_env_len ({history.max_env_len}) + alien_llm_response_length "
            f"({history.alien_llm_response_length}) is not less than astuner.rollout.max_model_len "
            f"({rollout.max_model_len}), so the model could not write a summary of a history that is too long; lower "
            "the first or raise the last",
            "astuner.context_tracker.max_env_len",
            "astuner.rollout.max_model_len",
        )


def _staleness(run: AstunerConfig) -> Iterator[Problem]:
    interval, staleness = run.asynchrony.sync_interval, run.asynchrony.max_staleness
    if interval > staleness + 1:
        yield _problem(
            f"with astuner.asynchrony.sync_interval {interval}, weights are up to {interval - 1} steps old, and "
            f"astuner.asynchrony.max_staleness is {staleness}; lower the first or raise the second",
            "astuner.asynchrony.sync_interval",
            "astuner.asynchrony.max_staleness",
        )
