"""Create the starting model of math_agent_tiny.yaml, which has about 1 M parameters.

A randomly initialised Qwen3 model is fine-tuned with astuner's supervised training on seeded transcripts. Half of the
transcripts use the Python tool and half guess, so the model starts out using the tool about half of the time and
reinforcement learning can improve on that. The model is cached in the user's cache folder under a name that contains a
hash of this recipe.
"""

import contextlib
import hashlib
import json
import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock, Timeout
from loguru import logger

from astuner import AstunerJob
from tutorial.example_math_agent.math_agent import system_prompt
from tutorial.example_math_agent.prepare_data import make_splits, make_task
from tutorial.example_math_agent.tiny_tokenizer import build_tokenizer


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters of the starting model and of its supervised training."""

    seed: int = 1
    hidden_size: int = 128
    intermediate_size: int = 384
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    context: int = 2048
    initializer_range: float = 0.06
    transcripts: int = 25_600
    validation_transcripts: int = 128
    batch: int = 16
    lr: float = 3e-3
    prompt_loss_weight: float = 0.1


def tiny_model() -> Path:
    """Return the folder of the starting model. Create the model if it does not exist."""
    recipe = Recipe()
    folder = _cache_folder() / f"math_agent_tiny_{_fingerprint(recipe)}"
    folder.mkdir(parents=True, exist_ok=True)
    with _exclusive(folder):
        if not (folder / "model" / "config.json").exists():
            _create(recipe, folder)
    return folder / "model"


def transcript(rng: random.Random, avoid: set[str], tools: list[dict]) -> dict:
    """Return a conversation in the form of the agent's. Questions in `avoid` are not used."""
    task = make_task(rng)
    while task["question"] in avoid:
        task = make_task(rng)
    question, answer = task["question"], task["answer"]
    messages = [{"role": "system", "content": system_prompt}, {"role": "user", "content": question}]
    final: dict[str, str] = {"role": "assistant"}
    if rng.random() < 0.5:
        expression = question.removeprefix("What is ").removesuffix("?")
        call = {"name": "execute_python_code", "arguments": json.dumps({"code": f"print({expression})"})}
        output = f"<returncode>0</returncode><stdout>{answer}\n</stdout><stderr></stderr>"
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": call}]},
            {"role": "tool", "content": output, "tool_call_id": "1", "name": "execute_python_code"},
        ]
    else:
        answer = str(int(answer) + rng.choice([1, -1, 10, -10, 100, -100]))
        # The thinking makes the first token, which decides against the tool, one that supervised training trains.
        final["reasoning_content"] = "I can do this in my head."
    final["content"] = f"\\boxed{{{answer}}}"
    messages.append(final)
    return {"messages": messages, "tools": tools}


@contextlib.contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    lock = FileLock(folder / "lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        logger.info("waiting for another run to create the starting model")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _tools() -> list[dict]:
    from agentscope.tool import Toolkit, execute_python_code

    toolkit = Toolkit()
    toolkit.register_tool_function(execute_python_code)
    return toolkit.get_json_schemas()


def _create(recipe: Recipe, folder: Path) -> None:
    logger.info("creating the starting model in {}; this takes some minutes and happens only once", folder)
    rng = random.Random(recipe.seed)
    training, validation = make_splits()
    avoid = {task["question"] for task in (*training, *validation)}
    tools = _tools()
    rows = [transcript(rng, avoid, tools) for _ in range(recipe.transcripts)]
    tokenizer = build_tokenizer(rows[:500], recipe.context)
    _blank_model(recipe, tokenizer).save_pretrained(folder / "blank")
    tokenizer.save_pretrained(folder / "blank")
    held_out = recipe.validation_transcripts
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[held_out:]))
    (folder / "validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:held_out]))
    job = AstunerJob(
        algorithm="sft",
        model=folder / "blank",
        project_name="math_agent",
        experiment_name="warm_up",
        model__renderer="qwen3",
        data__train_batch_size=recipe.batch,
        trainer_common__algorithm__prompt_loss_weight=recipe.prompt_loss_weight,
        trainer_common__optim={
            "lr": recipe.lr,
            "betas": (0.9, 0.95),
            "lr_scheduler": "cosine",
            "lr_warmup_steps": 20,
            "min_lr_ratio": 0.1,
        },
        trainer_common__total_epochs=1,
        trainer_common__save_freq=200,
        trainer_common__test_freq=200,
        trainer_common__seed=recipe.seed,
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


def _blank_model(recipe: Recipe, tokenizer):
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(recipe.seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=recipe.context,
        initializer_range=recipe.initializer_range,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def _fingerprint(recipe: Recipe) -> str:
    folder = Path(__file__).parent
    sources = [(folder / name).read_text() for name in ("prepare_model.py", "tiny_tokenizer.py", "prepare_data.py")]
    text = json.dumps([asdict(recipe), system_prompt, *sources])
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "astuner" / "models"


if __name__ == "__main__":
    print(tiny_model())
