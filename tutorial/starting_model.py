"""Create and cache the small starting models of the examples.

A randomly initialised Qwen3 model, or a pretrained model, is fine-tuned with astuner's supervised training on the
transcripts of an example. The result is cached in the user's cache folder under a name that contains a hash of its
recipe. An example can ship its starting model. It is used as long as the recipe is the one that made it.
"""

import ast
import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock, Timeout
from loguru import logger

from tutorial import tiny_tokenizer

RECIPE_HASH = "recipe_hash.txt"


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters of a starting model, its tokenizer and its supervised training.

    If training starts from a pretrained model, the model shape and the tokenizer settings have no effect.

    Attributes:
        name: Name of the model in the cache folder.
        renderer: Value of `model.renderer` during the supervised training.
        dtype: Value of `model.dtype` during the supervised training.
        context: Maximum sequence length, in tokens.
        vocabulary: Maximum number of tokens of the tokenizer.
        isolated: Regular expression. Each match is a separate token. With "", each digit is a separate token.
        keep_thinking: Whether the chat template renders the thinking of every answer. If False, it renders none.
        validation_transcripts: Number of transcripts, from the first, that are held out for the validation loss.
        batch: Number of transcripts per step. Training lasts one epoch.
        prompt_loss_weight: Loss weight of prompt tokens. Response tokens have weight 1.
    """

    name: str
    renderer: str = "qwen3"
    dtype: str = "auto"
    seed: int = 1
    hidden_size: int = 128
    intermediate_size: int = 384
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    context: int = 2048
    initializer_range: float = 0.06
    vocabulary: int = 1024
    isolated: str = ""
    keep_thinking: bool = False
    validation_transcripts: int = 128
    batch: int = 16
    lr: float = 3e-3
    prompt_loss_weight: float = 0.1


def starting_model(
    recipe: Recipe,
    make_transcripts: Callable[[], list[dict]],
    sources: Sequence[str | Path],
    pretrained: Callable[[], Path] | None = None,
    shipped: Path | None = None,
) -> Path:
    """Return the folder of a starting model. Create the model if it does not exist.

    Args:
        recipe: The hyperparameters.
        make_transcripts: Returns rows with `messages`, and with `tools` if the agent has tools. The tokenizer is
            trained on the first 500.
        sources: Files and texts that determine the transcripts. The model is created again if one of them changes,
            except for comments and docstrings.
        pretrained: Returns the folder of the model that the training starts from. By default, this is a Qwen3 model
            with random weights.
        shipped: Folder that `ship` wrote. It is returned if it was made with these hyperparameters and sources.
    """
    if shipped is not None and is_current(shipped, recipe, sources):
        return shipped
    folder = cache_folder() / f"{recipe.name}_{fingerprint(recipe, sources)}"
    folder.mkdir(parents=True, exist_ok=True)
    with exclusive(folder):
        if not (folder / "model" / "config.json").exists():
            logger.info("creating the starting model in {}; this takes some minutes and happens only once", folder)
            _create(recipe, make_transcripts(), folder, pretrained)
            logger.info("the starting model is ready")
    return folder / "model"


def cache_folder() -> Path:
    """Return the folder of all starting models."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "astuner" / "models"


def fingerprint(recipe: Recipe, sources: Sequence[str | Path]) -> str:
    """Return a hash of a recipe, of the sources, and of the code that creates models and tokenizers."""
    files = [Path(__file__), Path(tiny_tokenizer.__file__), *sources]
    texts = [_code(source) if isinstance(source, Path) else source for source in files]
    return hashlib.blake2b(json.dumps([asdict(recipe), *texts]).encode(), digest_size=6).hexdigest()


def _code(path: Path) -> str:
    """Return the text of a file. Comments, docstrings and the layout of Python code are left out."""
    text = path.read_text()
    if path.suffix != ".py":
        return text
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def ship(model: Path, folder: Path, recipe: Recipe, sources: Sequence[str | Path]) -> None:
    """Copy a starting model into the folder of its example, with weights in bfloat16 and the hash of its recipe."""
    from safetensors.torch import load_file, save_file

    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    save_file(
        {name: tensor.bfloat16() for name, tensor in weights.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    (folder / RECIPE_HASH).write_text(fingerprint(recipe, sources) + "\n")


def is_current(shipped: Path, recipe: Recipe, sources: Sequence[str | Path]) -> bool:
    """Return whether a shipped model was made with these hyperparameters and sources."""
    made_with = shipped / RECIPE_HASH
    return made_with.exists() and made_with.read_text().strip() == fingerprint(recipe, sources)


def build_tokenizer(recipe: Recipe, transcripts: list[dict]):
    """Return the tokenizer of a recipe."""
    return tiny_tokenizer.build_tokenizer(
        transcripts[:500],
        recipe.context,
        vocabulary=recipe.vocabulary,
        isolated=recipe.isolated,
        keep_thinking=recipe.keep_thinking,
    )


def blank_model(recipe: Recipe, tokenizer):
    """Return a Qwen3 model with random weights."""
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


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder in the cache during the block."""
    lock = FileLock(folder / "lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        logger.info("waiting for another run to create the model")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _create(recipe: Recipe, transcripts: list[dict], folder: Path, pretrained: Callable[[], Path] | None) -> None:
    from astuner import AstunerJob

    if pretrained is None:
        untrained = folder / "blank"
        tokenizer = build_tokenizer(recipe, transcripts)
        blank_model(recipe, tokenizer).save_pretrained(untrained)
        tokenizer.save_pretrained(untrained)
    else:
        untrained = pretrained()
    held_out = recipe.validation_transcripts
    for name, rows in (("train", transcripts[held_out:]), ("validation", transcripts[:held_out])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = AstunerJob(
        algorithm="sft",
        model=untrained,
        project_name=recipe.name,
        experiment_name="warm_up",
        model__renderer=recipe.renderer,
        model__dtype=recipe.dtype,
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
    shutil.rmtree(folder / "blank", ignore_errors=True)
    shutil.rmtree(tuned.record)
    for unneeded in folder.glob("*.jsonl"):
        unneeded.unlink()
