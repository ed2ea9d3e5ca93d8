"""Required values that are missing, and contradictions between keys."""

from __future__ import annotations

from collections.abc import Iterator

from astuner.config.algorithm_settings import SELF, TEACHER_KEY, is_server
from astuner.config.algorithms import ALGORITHMS
from astuner.config.corrections import CORRECTIONS
from astuner.config.data import part_names
from astuner.config.keys import dotted, is_changed, parts, schema, value_at
from astuner.config.root import AstunerConfig, RunConfig
from astuner.config.validation import Problem

_MAX_EPISODES = 1_000_000


def inconsistencies(config: RunConfig) -> Iterator[Problem]:
    """Yield the required values that are missing and the contradictions between keys."""
    run = config.astuner
    yield from _missing(run)
    yield from _task_selection(run)
    yield from _wrong_for_algorithm(config)
    yield from _devices(run)
    if not run.is_supervised:
        yield from _lengths(run)
        yield from _batches(run)
        yield from _targets(run)
        yield from _agent_loop(run)
        yield from _staleness(run)
        yield from _rubric_scores(run)
        yield from _correction(run)
        yield from _distillation(run)


def _problem(keys: str | tuple[str, ...], text: str) -> Problem:
    """Return a problem with one or more keys below `astuner`, located at the first of them that the user set."""
    return Problem(text, keys=tuple(parts(f"astuner.{key}") for key in ((keys,) if isinstance(keys, str) else keys)))


def _missing(run: AstunerConfig) -> Iterator[Problem]:
    if not run.model.path:
        yield _problem(
            "model.path",
            "the model to train is missing; add `path: Qwen/Qwen2.5-7B-Instruct` under `astuner:`, `model:`",
        )
    plays_workflow = not run.is_supervised and run.rollout.use_agentscope_protocol
    if plays_workflow and not run.rollout.agentscope_workflow and run.workflow.command is None:
        yield _problem(
            ("rollout.agentscope_workflow", "workflow.command"),
            "the workflow to tune is missing; add `agentscope_workflow: package.module->Class` under `astuner:`, "
            "`rollout:`, or `command: [python, my_agent.py]` under `astuner:`, `workflow:`, or "
            "`use_agentscope_protocol: False` under `rollout:` to play environments without a workflow",
        )
    if not run.is_supervised and run.rollout.agentscope_workflow and run.workflow.command is not None:
        yield _problem(
            ("rollout.agentscope_workflow", "workflow.command"),
            f"astuner.rollout.agentscope_workflow ({run.rollout.agentscope_workflow}) and astuner.workflow.command "
            "both name the agent; remove one of them",
        )
    if run.task_reader.type == "dataset_file" and not run.task_reader.dataset_file.training.file_path:
        yield _problem(
            "task_reader.dataset_file.training.file_path",
            "task_reader.type is dataset_file and no file is named; add `file_path: tasks.jsonl` under `astuner:`, "
            "`task_reader:`, `dataset_file:`, `training:`",
        )
    if run.task_reader.type == "mixture" and not run.task_reader.mixture:
        yield _problem(
            "task_reader.mixture",
            "task_reader.type is mixture and no reader is named; add entries such as "
            "`- {type: dataset_file, weight: 1.0, dataset_file: {training: {file_path: tasks.jsonl}}}` under "
            "`astuner:`, `task_reader:`, `mixture:`",
        )


def _task_selection(run: AstunerConfig) -> Iterator[Problem]:
    reader = run.task_reader
    names = part_names(reader.mixture)
    for index, (part, name) in enumerate(zip(reader.mixture, names, strict=True)):
        if part.type == "dataset_file" and not part.dataset_file.training.file_path:
            yield _problem(
                "task_reader.mixture",
                f"astuner.task_reader.mixture.{index} has type dataset_file and no dataset_file.training.file_path; "
                "set it to the path of a file",
            )
        if name in names[:index]:
            yield _problem(
                "task_reader.mixture",
                f"two entries of astuner.task_reader.mixture have the name {name!r}; give each its own name, because "
                "task ids begin with it",
            )
    difficulties = sum(entry.type == "difficulty" for entry in reader.filters)
    if difficulties > 1:
        yield _problem(
            "task_reader.filters",
            f"astuner.task_reader.filters has {difficulties} filters of type difficulty; expected at most one, because "
            "it acts during training",
        )
    if not run.is_supervised:
        return
    used = {"filters": difficulties, "curriculum": reader.curriculum.enable}
    for name in (name for name, is_used in used.items() if is_used):
        what = "a filter of type difficulty" if name == "filters" else "the curriculum"
        yield _problem(
            (f"task_reader.{name}", "trainer_common.algorithm.adv_estimator"),
            f"{what} (astuner.task_reader.{name}) depends on the success of episodes, and algorithm sft has none; "
            "remove it",
        )


def _rubric_scores(run: AstunerConfig) -> Iterator[Problem]:
    grader, section = run.task_judge.rubrics_auto_grader, "task_judge.rubrics_auto_grader"
    if not run.task_judge.learns_rubrics:
        return
    if grader.min_score >= grader.max_score:
        yield _problem(
            (f"{section}.min_score", f"{section}.max_score"),
            f"astuner.{section}.min_score is {grader.min_score:g}, expected a value below max_score, which is "
            f"{grader.max_score:g}",
        )
    elif not grader.min_score <= grader.success_threshold <= grader.max_score:
        yield _problem(
            f"{section}.success_threshold",
            f"astuner.{section}.success_threshold is {grader.success_threshold:g}, expected a value from min_score to "
            f"max_score ({grader.min_score:g} to {grader.max_score:g})",
        )


def _wrong_for_algorithm(config: RunConfig) -> Iterator[Problem]:
    algorithm = config.astuner.trainer_common.algorithm.adv_estimator
    for path, key in schema().keys.items():
        reason = key.rules[-1].wrong_for.get(algorithm)
        if reason and is_changed(config, path):
            yield Problem(
                f"{dotted(path)} is {value_at(config, path)}, and algorithm {algorithm} has no use for it: {reason}. "
                "Remove the key or choose another algorithm",
                keys=(path, parts("astuner.trainer_common.algorithm.adv_estimator")),
            )


def _devices(run: AstunerConfig) -> Iterator[Problem]:
    common = run.trainer_common
    gpus = (common.n_gpus_per_node or 1) * common.nnodes
    if run.backbone == "local" and gpus > 1:
        yield _problem(
            (
                "trainer_common.n_gpus_per_node" if common.nnodes == 1 else "trainer_common.nnodes",
                "trainer_common.n_gpus_per_node",
            ),
            f"astuner.trainer_common.n_gpus_per_node (n_gpu of AstunerJob) × nnodes is {gpus}, and --backbone=local "
            "trains on one device; remove both keys, or use --backbone=trinity or --backbone=verl",
        )


def _lengths(run: AstunerConfig) -> Iterator[Problem]:
    rollout = run.rollout
    buffer = run.trainer_common.algorithm.overlong_buffer_length
    if buffer > run.data.max_response_length:
        yield _problem(
            ("trainer_common.algorithm.overlong_buffer_length", "data.max_response_length"),
            f"astuner.trainer_common.algorithm.overlong_buffer_length ({buffer}) is more than "
            f"astuner.data.max_response_length ({run.data.max_response_length}), whose last tokens it covers; lower "
            "the first or raise the second",
        )
    if rollout.max_response_length_in_one_turn > rollout.max_model_len:
        yield _problem(
            ("rollout.max_response_length_in_one_turn", "rollout.max_model_len"),
            f"astuner.rollout.max_response_length_in_one_turn ({rollout.max_response_length_in_one_turn}) is more "
            f"than astuner.rollout.max_model_len ({rollout.max_model_len}), which limits prompt and answer together; "
            "lower the first or raise the second",
        )


def _batches(run: AstunerConfig) -> Iterator[Problem]:
    rollout, trainer = run.rollout, run.trainer_common
    episodes = run.data.train_batch_size * rollout.num_repeat
    if trainer.mini_batch_num > episodes:
        yield _problem(
            ("trainer_common.mini_batch_num", "data.train_batch_size", "rollout.num_repeat"),
            f"astuner.trainer_common.mini_batch_num ({trainer.mini_batch_num}) is more than the episodes of a step: "
            f"astuner.data.train_batch_size ({run.data.train_batch_size}) × astuner.rollout.num_repeat "
            f"({rollout.num_repeat}) = {episodes}; lower the first or raise one of the others",
        )
    elif trainer.mini_batch_by == "group" and trainer.mini_batch_num > run.data.train_batch_size:
        yield _problem(
            ("trainer_common.mini_batch_num", "data.train_batch_size", "trainer_common.mini_batch_by"),
            f"astuner.trainer_common.mini_batch_num ({trainer.mini_batch_num}) is more than the groups of a step: "
            f"astuner.data.train_batch_size is {run.data.train_batch_size}, and with mini_batch_by: group, no group is "
            "divided; lower the first, raise the second, or write mini_batch_by: episode",
        )
    if episodes > _MAX_EPISODES:
        yield _problem(
            ("data.train_batch_size", "rollout.num_repeat"),
            f"a step has astuner.data.train_batch_size ({run.data.train_batch_size:,}) × astuner.rollout.num_repeat "
            f"({rollout.num_repeat:,}) = {episodes:,} episodes; expected at most {_MAX_EPISODES:,}, because a step's "
            "episodes are in memory together; lower one of them",
        )
    algorithm = trainer.algorithm.adv_estimator
    reinforcement = ALGORITHMS[algorithm].reinforcement
    compares = reinforcement is not None and reinforcement.advantage.compares_group
    if compares and rollout.num_repeat < 2 and run.backbone != "debug":
        yield _problem(
            ("rollout.num_repeat", "trainer_common.algorithm.adv_estimator"),
            f"{algorithm} compares the episodes of one task, so astuner.rollout.num_repeat must be at least 2, "
            f"and it is {rollout.num_repeat}",
        )


def _targets(run: AstunerConfig) -> Iterator[Problem]:
    trainable, frozen = run.rollout.trainable_targets, run.rollout.frozen_models
    if trainable is not None and not trainable:
        yield _problem(
            "rollout.trainable_targets",
            "rollout.trainable_targets is empty, so nothing would be trained; name the targets to train, or write "
            "null to train all",
        )
    for tag, model in frozen.items():
        key = "rollout.frozen_models"
        if trainable is None or tag in trainable:
            yield _problem(
                (key, "rollout.trainable_targets"),
                f"rollout.frozen_models names a model for {tag!r}, which is trained; remove it, or list in "
                "rollout.trainable_targets only the targets to train",
            )
        if (model.base_url is None) != (model.model in ("policy", "starting_model")):
            yield _problem(
                key,
                f"rollout.frozen_models.{tag} has model {model.model!r} and base_url {model.base_url!r}; write both to "
                "use an endpoint, neither to use the model in training, or only `model: starting_model` to use its "
                "weights at the start of the run",
            )
        elif model.model == "starting_model" and run.backbone in ("trinity", "verl"):
            yield _problem(
                key,
                f"rollout.frozen_models.{tag} is the starting model, which {run.backbone} does not keep for sampling; "
                "use backbone local, or serve the model at an endpoint and write its base_url",
            )


def _agent_loop(run: AstunerConfig) -> Iterator[Problem]:
    rollout = run.rollout
    protocol = "rollout.use_agentscope_protocol"
    if rollout.use_agentscope_protocol:
        if rollout.gamma != 1:
            yield _problem(
                ("rollout.gamma", protocol),
                f"astuner.rollout.gamma is {rollout.gamma:g}, and only the built-in agent loop "
                "(rollout.use_agentscope_protocol: False) knows the rewards of steps; write 1.0 or remove the line",
            )
        return
    agents = {
        "rollout.agentscope_workflow": rollout.agentscope_workflow,
        "workflow.command": run.workflow.command,
    }
    for name in (name for name, agent in agents.items() if agent):
        yield _problem(
            (name, protocol),
            f"astuner.{protocol} is False, which plays the environment with the built-in agent loop, and "
            f"astuner.{name} names another agent; remove one of the two lines",
        )
    if run.task_reader.type not in ("env_service", "mixture") and "->" not in run.task_reader.type:
        yield _problem(
            ("task_reader.type", protocol),
            f"astuner.{protocol} is False, which plays the environment of each task, and the tasks of task_reader.type "
            f"{run.task_reader.type} have no environment; write `type: env_service`, or name a workflow in "
            "agentscope_workflow",
        )
    yield from _agent_loop_settings(run)


def _agent_loop_settings(run: AstunerConfig) -> Iterator[Problem]:
    rollout, history = run.rollout, run.context_tracker
    for seat in rollout.players:
        for name, seats in (("trainable_targets", rollout.trainable_targets), ("frozen_models", rollout.frozen_models)):
            if seat in (seats or ()):
                yield _problem(
                    ("rollout.players", f"rollout.{name}"),
                    f"rollout.players has a program for {seat!r}, and rollout.{name} names {seat!r} as a seat of a "
                    "model; remove one of the two",
                )
    if rollout.action_form == "tool_call" and rollout.agentscope_disable_toolcalls:
        yield _problem(
            ("rollout.agentscope_disable_toolcalls", "rollout.action_form"),
            "astuner.rollout.action_form is tool_call, and astuner.rollout.agentscope_disable_toolcalls hides tools "
            "from the model; remove one of the two lines",
        )
    if run.task_judge.judge_protocol and (rollout.step_rewards != "sum" or rollout.gamma != 1):
        changed = "step_rewards" if rollout.step_rewards != "sum" else "gamma"
        yield _problem(
            (f"rollout.{changed}", "task_judge.judge_protocol"),
            f"astuner.rollout.{changed} is {getattr(rollout, changed)}, which is about the rewards of the "
            "environment's steps, and astuner.task_judge.judge_protocol replaces them with one score; remove one of "
            "the two lines",
        )
    room = rollout.max_model_len - history.alien_llm_response_length
    own = history.context_tracker_type == "auto_context" and history.auto_context_cm.base_url is None
    if own and history.max_env_len >= room:
        yield _problem(
            ("context_tracker.max_env_len", "rollout.max_model_len"),
            f"astuner.context_tracker.max_env_len ({history.max_env_len}) + alien_llm_response_length "
            f"({history.alien_llm_response_length}) is not less than astuner.rollout.max_model_len "
            f"({rollout.max_model_len}), so the model could not write a summary of a history that is too long; lower "
            "the first or raise the last",
        )


def _staleness(run: AstunerConfig) -> Iterator[Problem]:
    interval, staleness = run.asynchrony.sync_interval, run.asynchrony.max_staleness
    if interval > staleness + 1:
        yield _problem(
            ("asynchrony.sync_interval", "asynchrony.max_staleness"),
            f"with astuner.asynchrony.sync_interval {interval}, weights are up to {interval - 1} steps old, and "
            f"astuner.asynchrony.max_staleness is {staleness}; lower the first or raise the second",
        )


def _correction(run: AstunerConfig) -> Iterator[Problem]:
    """Yield the contradictions between the keys of `trainer_common.correction` and between them and other keys."""
    correction, section = run.trainer_common.correction, "trainer_common.correction"
    mode = "none" if correction.mode == "auto" else correction.mode
    spec = CORRECTIONS[mode]
    if spec.weights and run.trainer_common.algorithm.has_ratio and correction.old_logprobs == "sampler":
        yield _problem(
            (f"{section}.old_logprobs", f"{section}.mode"),
            f"astuner.{section}.old_logprobs is sampler, so the ratio of the loss is to the sampler, and "
            f"astuner.{section}.mode {mode} would correct for the sampler again; remove old_logprobs, or write mode: "
            "none, geo_rs or k3_rs",
        )
    several = run.backbone == "trinity" and run.trainer_common.mini_batch_num > 1
    if several and correction.old_logprobs == "trainer":
        yield _problem(
            (f"{section}.old_logprobs", "trainer_common.mini_batch_num"),
            f"astuner.{section}.old_logprobs is trainer, and with trainer_common.mini_batch_num "
            f"{run.trainer_common.mini_batch_num}, trinity updates the weights before it computes the logprobs of the "
            "later mini-batches; remove old_logprobs, write mini_batch_num: 1, or use --backbone=verl",
        )
    elif several and spec.weights and run.trainer_common.algorithm.has_ratio:
        yield _problem(
            (f"{section}.mode", "trainer_common.mini_batch_num"),
            f"astuner.{section}.mode {mode} needs the trainer's logprobs before the update, and with trainer_common."
            f"mini_batch_num {run.trainer_common.mini_batch_num}, trinity updates the weights before it computes those "
            "of the later mini-batches; write mode: none, geo_rs or k3_rs, write mini_batch_num: 1, or use "
            "--backbone=verl",
        )
    if correction.mode == "auto":
        return
    has_lower_bound = {"weight": spec.masks, "rejection": spec.rejects == "geometric"}
    for name, (low, high) in {"weight": correction.weight_range, "rejection": correction.rejection_range}.items():
        if has_lower_bound[name] and low >= high:
            yield _problem(
                (f"{section}.min_{name}", f"{section}.max_{name}"),
                f"astuner.{section}.min_{name} is {low:g}, expected a value below max_{name}, which is {high:g}; null "
                f"is the value of mode {mode}",
            )


def _distillation(run: AstunerConfig) -> Iterator[Problem]:
    """Yield the contradictions between the keys of `trainer_common.distillation` and between them and other keys."""
    distillation, teacher = run.trainer_common.distillation, TEACHER_KEY
    if distillation.teacher is None:
        return
    algorithm = run.trainer_common.algorithm.adv_estimator
    rule = ALGORITHMS[algorithm].reinforcement
    if rule is not None and rule.loss.by_call:
        yield _problem(
            (teacher, "trainer_common.algorithm.adv_estimator"),
            f"astuner.{teacher} gives each token an advantage, and the loss of {algorithm} has one advantage per "
            "answer; write trainer_common.algorithm: grpo, or another algorithm whose loss is computed per token",
        )
    if distillation.teacher == SELF and distillation.hint is None:
        yield _problem(
            (teacher, "trainer_common.distillation.hint"),
            f"astuner.{teacher} is self and there is no hint, so the teacher is the model itself and teaches nothing; "
            'add `hint: "The correct answer is {answer}."` under `distillation:`, or name another teacher',
        )
    if is_server(distillation.teacher) and run.rollout.temperature not in (0.0, 1.0):
        yield _problem(
            (teacher, "rollout.temperature"),
            f"astuner.{teacher} is a server, which scores tokens at temperature 1, and rollout.temperature is "
            f"{run.rollout.temperature:g}; write temperature: 1.0 under `rollout:`, or name the folder of a model",
        )
