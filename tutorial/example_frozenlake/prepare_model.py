"""Create the starting model of frozenlake_tiny.yaml, which has about 0.2 M parameters.

A randomly initialised Qwen3 model is fine-tuned with astuner's supervised training on seeded transcripts in which 40%
of the moves are random and the others lead to the goal. Such a player rarely arrives within eight moves, and
reinforcement learning can improve on it. The maps of the transcripts belong to the training split. The model is cached
in the user's cache folder under a name that contains a hash of this recipe.
"""

import hashlib
import json
import random
import shutil
from collections import deque
from dataclasses import asdict
from pathlib import Path

from loguru import logger

from astuner import AstunerJob
from astuner.env_service import Environment, load_environment
from tutorial.example_math_agent.prepare_model import Recipe, _blank_model, _cache_folder, _exclusive
from tutorial.example_math_agent.tiny_tokenizer import MARKUP, SPECIAL, _wrap

RECIPE = Recipe(
    hidden_size=64,
    intermediate_size=192,
    heads=4,
    head_dim=16,
    context=1024,
    transcripts=12_800,
    batch=32,
    lr=3e-3,
)
RANDOM_MOVES = 0.4
MAX_MOVES = 8
MOVES = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}


def tiny_model() -> Path:
    """Return the folder of the starting model. Create the model if it does not exist."""
    folder = _cache_folder() / f"frozenlake_tiny_{_fingerprint()}"
    folder.mkdir(parents=True, exist_ok=True)
    with _exclusive(folder):
        if not (folder / "model" / "config.json").exists():
            _create(folder)
    return folder / "model"


def best_moves(text: str) -> list[str]:
    """Return the first moves of the shortest paths to the goal, in the map of an observation."""
    rows = [row for row in text.splitlines() if row and set(row) <= set("PFHGS")]
    cells = {(r, c): cell for r, row in enumerate(rows) for c, cell in enumerate(row)}
    goal = next(place for place, cell in cells.items() if cell == "G")
    start = next(place for place, cell in cells.items() if cell == "P")
    distance, queue = {goal: 0}, deque([goal])
    while queue:
        row, column = queue.popleft()
        for down, right in MOVES.values():
            place = (row - down, column - right)
            if cells.get(place, "H") != "H" and place not in distance:
                distance[place] = distance[row, column] + 1
                queue.append(place)
    after = {move: (start[0] + down, start[1] + right) for move, (down, right) in MOVES.items()}
    return [move for move, place in after.items() if distance.get(place, 99) < distance[start]]


def transcript(environment: Environment, task_id: str, rng: random.Random) -> dict:
    """Return a game with random moves, as a conversation in the form of the agent loop's."""
    observation = environment.reset("train", task_id, 0).text
    instruction = environment.profile("train", task_id).main_query
    messages = [{"role": "user", "content": f"{instruction}\n\n{observation}"}]
    for _ in range(MAX_MOVES):
        move = rng.choice(list(MOVES) if rng.random() < RANDOM_MOVES else best_moves(observation))
        messages.append({"role": "assistant", "content": move})
        result = environment.step(move)
        if result.is_done:
            break
        observation = result.observation.text
        messages.append({"role": "user", "content": observation})
    return {"messages": messages if messages[-1]["role"] == "assistant" else messages[:-1]}


def build_tokenizer(rows: list[dict]):
    """Return a tokenizer in which each cell of a map is a token, and the instruction a few long ones."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("[PFHGS\n]"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=768 - len(MARKUP),
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        [f"{message['role']}\n{message['content']}" for row in rows for message in row["messages"]], trainer
    )
    return _wrap(tokenizer, RECIPE.context)


def _create(folder: Path) -> None:
    logger.info("creating the starting model in {}; this takes some minutes and happens only once", folder)
    rng = random.Random(RECIPE.seed)
    environment = load_environment("gymnasium/FrozenLake-v1", {"train_tasks": 4000, "seed": 1})
    ids = list(environment.task_ids("train"))
    rows = [transcript(environment, ids[number % len(ids)], rng) for number in range(RECIPE.transcripts)]
    tokenizer = build_tokenizer(rows[:500])
    _blank_model(RECIPE, tokenizer).save_pretrained(folder / "blank")
    tokenizer.save_pretrained(folder / "blank")
    held_out = RECIPE.validation_transcripts
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[held_out:]))
    (folder / "validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:held_out]))
    job = AstunerJob(
        algorithm="sft",
        model=folder / "blank",
        project_name="frozenlake",
        experiment_name="warm_up",
        model__renderer="qwen3",
        data__train_batch_size=RECIPE.batch,
        trainer_common__algorithm__prompt_loss_weight=0.1,
        trainer_common__optim={
            "lr": RECIPE.lr,
            "betas": (0.9, 0.95),
            "lr_scheduler": "cosine",
            "lr_warmup_steps": 20,
            "min_lr_ratio": 0.1,
        },
        trainer_common__total_epochs=1,
        trainer_common__save_freq=1000,
        trainer_common__test_freq=100,
        trainer_common__seed=RECIPE.seed,
        trainer_common__use_kl_loss=False,
    )
    job.set_data(type="file", dataset_path=folder / "train.jsonl", validation_path=folder / "validation.jsonl")
    tuned = job.tune(exp_dir=folder)
    tuned.path.rename(folder / "model")
    for unneeded in (folder / "blank", tuned.record):
        shutil.rmtree(unneeded)
    for unneeded in folder.glob("*.jsonl"):
        unneeded.unlink()
    logger.info("the starting model is ready")


def _fingerprint() -> str:
    text = json.dumps([asdict(RECIPE), Path(__file__).read_text()])
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


if __name__ == "__main__":
    print(tiny_model())
