"""Checks of a run's inputs before the first rollout."""

from __future__ import annotations

from collections import Counter

from astuner.config.algorithms import ALGORITHMS
from astuner.diagnostics.evidence import REFERENCE_FIELDS, Result, StartEvidence
from astuner.errors import short_repr

_REWARD_FIELDS = ("reward", "rewards", "score", "is_correct", "is_success")
# AdamW changes each weight by about the learning rate. Typical weights have magnitudes of 0.01 to 1.
_LARGEST_RATE = 0.1
# AdamW changes each weight by at most about rate × steps. float32 rounds most changes below this to zero.
_SMALLEST_TOTAL_CHANGE = 1e-9


def validation_in_training(start: StartEvidence) -> Result:
    """Find validation tasks whose question is also a training question."""
    counts = Counter(task.main_query for task in start.tasks.training if task.main_query)
    # Many environments have the same instruction for all tasks, and show the task in the first observation.
    instructions = {task.main_query for task in start.tasks.training if task.env and counts[task.main_query] > 1}
    questions = counts.keys() - instructions
    shared = sum(task.main_query in questions for task in start.tasks.validation)
    if shared:
        yield (
            f"{shared} of {len(start.tasks.validation)} validation tasks have the same question as a training task; "
            "validation will overestimate the model",
            "remove these tasks from the training data, or set other data for validation in task_reader",
        )


def duplicate_tasks(start: StartEvidence) -> Result:
    """Find training data in which most tasks repeat the question of another."""
    tasks = start.tasks.training
    counts = Counter((task.main_query, str(task.init_messages)) for task in tasks if task.main_query and not task.env)
    repeated = sum(counts.values()) - len(counts)
    # Oversampled data repeats some questions; a wrong field gives the same text to most rows.
    if len(tasks) >= 8 and repeated > 0.75 * len(tasks):
        question = counts.most_common(1)[0][0][0]
        yield (
            f"{repeated} of {len(tasks)} training tasks repeat the question of another task; the most frequent is "
            f"{question[:80]!r}",
            "remove the duplicates, or set fields.main_query of the task_reader to the field with the questions",
        )


def missing_references(start: StartEvidence) -> Result:
    """Find training data whose reference answer is empty in most rows."""
    tasks = start.tasks.training
    for field in REFERENCE_FIELDS:
        values = [task.metadata[field] for task in tasks if field in task.metadata]
        empty = sum(value is None or (isinstance(value, str) and not value.strip()) for value in values)
        if values and empty > len(tasks) / 2:
            yield (
                f"the field {field!r} is empty in {empty} of {len(tasks)} training tasks, so a judge has no reference "
                "for their answers",
                f"fill {field!r} in the data, or remove the tasks without a reference answer",
            )


def reward_column_is_text(start: StartEvidence) -> Result:
    """Find a reward field whose numbers or booleans were read as text."""
    tasks = start.tasks.training
    for field in _REWARD_FIELDS:
        values = [task.metadata[field] for task in tasks if task.metadata.get(field) is not None]
        if values and all(isinstance(value, str) and _is_number_or_truth(value) for value in values):
            yield (
                f"the field {field!r} of the training tasks is text, for example {short_repr(values[0])}. Every "
                'non-empty text is true, including "0" and "False", and arithmetic with text fails',
                f"write numbers to {field!r} in the data, or convert the text in the judge with float(...)",
            )


def _is_number_or_truth(text: str) -> bool:
    if text.strip().lower() in ("true", "false"):
        return True
    try:
        float(text)
    except ValueError:
        return False
    return True


def vocabulary_mismatch(start: StartEvidence) -> Result:
    """Find a tokenizer that belongs to another model."""
    model = start.model
    if model.vocabulary is not None and model.tokenizer_size > model.vocabulary:
        yield (
            f"the tokenizer has token ids up to {model.tokenizer_size - 1}, but the model's embedding has "
            f"{model.vocabulary} rows: the tokenizer belongs to another model",
            "copy the tokenizer files of the model to the folder of model.path, or resize the model's embedding",
        )
    # Models pad their embedding to a multiple of some hundred rows, which is far less than its half.
    elif model.vocabulary is not None and model.tokenizer_size < model.vocabulary / 2:
        yield (
            f"the tokenizer has {model.tokenizer_size} token ids, but the model's embedding has {model.vocabulary} "
            "rows: the tokenizer belongs to another model",
            "copy the tokenizer files of the model to the folder of model.path",
        )
    if start.template.unknown_share > 0.1:
        yield (
            f"{start.template.unknown_share:.0%} of the tokens of a rendered prompt are the tokenizer's unknown token: "
            "the tokenizer does not have the text's characters",
            "use the tokenizer of the model; the tokenizer files are read from model.path",
        )


def end_token_mismatch(start: StartEvidence) -> Result:
    """Find a model whose end-of-sequence token does not end an answer for the tokenizer and the chat template."""
    model = start.model
    if not model.end_ids or set(model.end_ids) & set(model.stop_ids):
        return
    named = ", ".join(f"{token} {start.decode([token])!r}" for token in model.end_ids[:3])
    stops = ", ".join(f"{token} {start.decode([token])!r}" for token in model.stop_ids[:3])
    yield (
        f"the model's files end a sequence with token {named}, but answers of this run end with {stops}: the model "
        "may never sample the token that ends an answer",
        "use the tokenizer and the chat template that the model was trained with, or correct eos_token_id in the "
        "model's generation_config.json and config.json",
    )


def wrong_chat_template(start: StartEvidence) -> Result:
    """Find a chat template that leaves out messages, or writes control tokens that the tokenizer does not have."""
    template = start.template
    fix = (
        "use the chat template that the model was trained with: chat_template in its tokenizer_config.json (or "
        "chat_template.jinja) under model.path, or set model.renderer to the family of the model"
    )
    if template.split_controls:
        yield (
            f"the chat template writes {', '.join(template.split_controls)}, which the tokenizer splits into several "
            "tokens: the template is wrong for this model",
            fix,
        )
    if template.shows_user is False:
        yield "the chat template is wrong: a prompt does not contain the user's message", fix


def doubled_bos(start: StartEvidence) -> Result:
    """Find a chat template and a tokenizer that both add the begin-of-sequence token."""
    if start.template.bos_count > 1:
        yield (
            f"a rendered prompt starts with {start.template.bos_count} begin-of-sequence tokens (doubled BOS), which "
            "the model has never seen",
            BOS_FIX,
        )


BOS_FIX = (
    "remove bos_token from the chat template, or set add_bos_token: false in tokenizer_config.json, so that only one "
    "of them adds it"
)


def greedy_training(start: StartEvidence) -> Result:
    """Find training with greedy sampling, in which all episodes of a group have the same answers."""
    rollout = start.config.rollout
    if not start.trains or ALGORITHMS[start.config.trainer_common.algorithm.adv_estimator].reinforcement is None:
        return
    if rollout.temperature == 0 or rollout.top_k == 1:
        setting = "rollout.temperature is 0" if rollout.temperature == 0 else "rollout.top_k is 1"
        yield (
            f"{setting}, so training samples greedily: the episodes of a task are equal, and nothing can be learned "
            "from their comparison",
            "set rollout.temperature to 0.7 to 1.0 and rollout.top_k to -1 (rollout.val_kwargs sets the sampling of "
            "validation)",
        )


def learning_rate(start: StartEvidence) -> Result:
    """Find a learning rate that destroys the model in one step, or that has no effect."""
    common = start.config.trainer_common
    if not start.trains:
        return
    rate = common.optim.lr
    if rate > _LARGEST_RATE:
        yield (
            f"trainer_common.optim.lr is {rate:g}: AdamW changes every weight by about this amount in each optimizer "
            "step, which destroys the model",
            "lower trainer_common.optim.lr to 1e-6 to 1e-5 for all weights, or 1e-5 to 1e-3 for LoRA",
        )
    steps = (common.total_training_steps or 100_000) * common.mini_batch_num
    if rate * steps < _SMALLEST_TOTAL_CHANGE:
        yield (
            f"trainer_common.optim.lr is {rate:g}: in {steps} optimizer steps no weight changes by more than "
            f"{rate * steps:.2g}, so the model does not change",
            "raise trainer_common.optim.lr to 1e-6 to 1e-5 for all weights, or 1e-5 to 1e-3 for LoRA",
        )
