"""Create the starting model of kuhn_poker_tiny.yaml: a tiny model that chooses legal actions about uniformly.

A randomly initialised Qwen3 model is fine-tuned with astuner's supervised training on games of two uniform players. The
model is cached in the user's cache folder under a name that contains a hash of this recipe.
"""

import hashlib
import json
import os
import random
import shutil
from pathlib import Path

from filelock import FileLock
from loguru import logger

from astuner import AstunerJob
from tutorial.example_kuhn_poker.kuhn_poker import KuhnPoker, answer_with, card_of, instruction_of
from tutorial.example_math_agent import tiny_tokenizer

SEED = 1
GAMES = 2_000
HELD_OUT = 64
CONTEXT = 1024


def tiny_model() -> Path:
    """Return the folder of the starting model. Create the model if it does not exist."""
    sources = [Path(__file__), Path(tiny_tokenizer.__file__)]
    recipe = hashlib.blake2b(b"".join(file.read_bytes() for file in sources), digest_size=6).hexdigest()
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = caches / "astuner" / "models" / f"kuhn_poker_tiny_{recipe}"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        if not (folder / "model" / "config.json").exists():
            _create(folder)
    return folder / "model"


def transcripts() -> list[dict]:
    """Return the conversations of both players in games of uniform players, as the agent loop has them.

    The players first name their card and then choose the action in a box, which is all that the opponent sees.
    """
    environment, rng = KuhnPoker(train_tasks=GAMES), random.Random(SEED)
    rows = []
    for task_id in environment.task_ids("train"):
        instruction = instruction_of(environment)
        observation, is_done = environment.reset("train", task_id, 0), False
        conversations: dict[str, list[dict]] = {}
        while not is_done:
            messages = conversations.setdefault(observation.agent, [])
            text = observation.text if messages else f"{instruction}\n\n{observation.text}"
            action = rng.choice(observation.legal_actions)
            answer = answer_with(card_of(messages[0]["content"] if messages else text), action)
            messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
            result = environment.step(action)
            observation, is_done = result.observation, result.is_done
        rows += [{"messages": messages, "tools": []} for messages in conversations.values()]
    rng.shuffle(rows)
    return rows


def _create(folder: Path) -> None:
    logger.info("creating the starting model in {}; this happens only once", folder)
    rows = transcripts()
    tokenizer = tiny_tokenizer.build_tokenizer(rows[:500], CONTEXT)
    _blank_model(tokenizer).save_pretrained(folder / "blank")
    tokenizer.save_pretrained(folder / "blank")
    for name, part in (("train", rows[HELD_OUT:]), ("validation", rows[:HELD_OUT])):
        lines = [json.dumps({"messages": row["messages"]}) + "\n" for row in part]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    job = AstunerJob(
        algorithm="sft",
        model=folder / "blank",
        project_name="kuhn_poker",
        experiment_name="warm_up",
        data__train_batch_size=16,
        trainer_common__optim={"lr": 1e-3, "lr_scheduler": "cosine", "lr_warmup_steps": 10, "min_lr_ratio": 0.1},
        trainer_common__total_epochs=1,
        trainer_common__save_freq=1000,
        trainer_common__test_freq=1000,
        trainer_common__seed=SEED,
        trainer_common__use_kl_loss=False,
    )
    job.set_data(type="file", dataset_path=folder / "train.jsonl", validation_path=folder / "validation.jsonl")
    tuned = job.tune(exp_dir=folder)
    tuned.path.rename(folder / "model")
    for unneeded in (folder / "blank", tuned.record):
        shutil.rmtree(unneeded)
    for unneeded in folder.glob("*.jsonl"):
        unneeded.unlink()


def _blank_model(tokenizer):
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(SEED)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        initializer_range=0.06,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


if __name__ == "__main__":
    print(tiny_model())
