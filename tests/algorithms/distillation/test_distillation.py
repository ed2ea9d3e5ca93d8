"""The advantages of a teacher, its hints, and runs that learn from it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from astuner.algorithms.distillation.distiller import Distiller, check_hint, hint_text, prompt_with_hint
from astuner.algorithms.distillation.teachers import ModelTeacher, TeacherSequence
from astuner.algorithms.registry import resolve
from astuner.algorithms.training_rows import TrainingRow, sample_updates, token_advantages, training_rows
from astuner.backbone.local.policy import Optimizer, Policy
from astuner.backbone.local.update import PolicyUpdate
from astuner.config.algorithm_settings import DistillationConfig
from astuner.config.loading import load_config
from astuner.config.model import ModelConfig
from astuner.config.root import AstunerConfig
from astuner.context_tracker.merge import build_samples
from astuner.errors import ConfigError
from astuner.llm_engine.causal_lm import load_causal_lm
from astuner.model_tuner.codec import ChatCodec
from astuner.schema import Episode, Judgement, LlmCall, Task


@dataclass
class Scripted:
    """A teacher with the same log-probability for all tokens; it keeps the sequences."""

    logprob: float = -1.0
    seen: list[TeacherSequence] = field(default_factory=list)

    def logprobs(self, sequences: Sequence[TeacherSequence]) -> list[NDArray[np.float32]]:
        self.seen += sequences
        results = []
        for sequence in sequences:
            values = np.zeros(len(sequence.token_ids), np.float32)
            for start, end in sequence.spans:
                values[start:end] = self.logprob
            results.append(values)
        return results

    def close(self) -> None:
        pass


def call(
    number: int, prompt: Sequence[int], answer: Sequence[int], logprobs: Sequence[float], **fields: Any
) -> LlmCall:
    return LlmCall(f"c{number}", "e0", tuple(prompt), tuple(answer), tuple(logprobs), "stop", **fields)


def episode(*calls: LlmCall, reward: float = 1.0, **fields: Any) -> Episode:
    samples = tuple(build_samples(calls, "leaf"))
    task = Task("t0", "What is 2 + 2?", metadata={"answer": "4"})
    return Episode("e0", task, 0, "ok", reward, True, calls, samples=samples, **fields)


def rows_of(made: Episode) -> list[TrainingRow]:
    return [row.with_advantages(0.5, {}) for row in training_rows([made])]


def test_the_advantage_of_a_token_worked_out_by_hand(tokenizer: Any):
    made = episode(call(0, [1, 2], [3, 4], [-0.5, -3.0]), call(1, [1, 2, 3, 4, 5], [6], [-50.0]))
    settings = DistillationConfig(teacher="folder", coef=2.0)
    (row,), metrics = Distiller(settings, Scripted(-1.0), ChatCodec(tokenizer, "qwen3")).assign_to(
        rows_of(made), [made]
    )
    # log teacher - log π is -0.5, 2 and 49, which is clipped to 20; the mean is 43 / 6.
    assert row.teacher_advantages is not None
    assert row.teacher_advantages.tolist() == pytest.approx([0.0, 0.0, -46 / 3, -31 / 3, 0.0, 77 / 3])
    assert metrics["distillation/kl"] == pytest.approx(-(-0.5 + 2.0 + 20.0) / 3)
    assert metrics["time/teacher"] >= 0
    (advantages,) = token_advantages([row], 6).tolist()
    assert advantages == pytest.approx([0.0, 0.0, -46 / 3 + 0.5, -31 / 3 + 0.5, 0.0, 77 / 3 + 0.5])
    assert row.has_advantage
    # The record has the advantages that were trained.
    ((update,),) = sample_updates([made], [row], {})
    assert update.advantages == tuple((1, value) for value in advantages if value)


def test_a_hint_is_in_the_prompts_of_the_teacher_only(tokenizer: Any):
    codec = ChatCodec(tokenizer, "qwen3")
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    question = [{"role": "user", "content": "What is 2 + 2?"}]
    prompt = codec.render(question, tools)
    answer = codec.encode("5")
    reply = {"role": "assistant", "content": "5"}
    first = call(0, prompt, answer, [-1.0] * len(answer), messages=(*question, reply))
    second_request = [*question, reply, {"role": "user", "content": "Sure?"}]
    second_prompt = (
        *prompt,
        *answer,
        *codec.encode("<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"),
    )
    second = call(1, second_prompt, answer, [-1.0] * len(answer), messages=(*second_request, reply))
    made = episode(first, second, judgement=Judgement(0.0, explanation="4 is right"))
    teacher = Scripted()
    settings = DistillationConfig(teacher="self", hint="Answer {answer}, because {explanation} ({reward:g}).")
    (row,), metrics = Distiller(settings, teacher, codec).assign_to(rows_of(made), [made])
    assert metrics["distillation/calls_without_hint"] == 0
    texts = [codec.decode([int(token) for token in sequence.token_ids]) for sequence in teacher.seen]
    hint = "Answer 4, because 4 is right (1)."
    assert f"What is 2 + 2?\n\n{hint}<|im_end|>" in texts[0]
    assert '"name": "add"' in texts[0]
    assert texts[1].count(hint) == 1
    assert f"Sure?\n\n{hint}<|im_end|>" in texts[1]
    for sequence in teacher.seen:
        assert tuple(sequence.token_ids[-len(answer) :]) == answer
        assert sequence.spans == [(len(sequence.token_ids) - len(answer), len(sequence.token_ids))]
    assert row.teacher_advantages is not None
    assert np.count_nonzero(np.asarray(row.train_counts)) == 2 * len(answer)
    assert row.teacher_advantages.tolist() == [0.0] * len(row.token_ids)  # both logprobs are -1


def test_calls_without_a_place_for_the_hint_are_counted(tokenizer: Any, log: list[str]):
    codec = ChatCodec(tokenizer, "qwen3")
    question = {"role": "user", "content": "?"}
    reply = {"role": "assistant", "content": "5"}
    prompt = codec.render([question], None)
    other = {**question, "content": [{"type": "text", "text": "?"}]}
    assert prompt_with_hint(codec, call(0, prompt, [9], [-1.0], messages=(question, reply)), "x") is not None
    for number, messages in enumerate([(), (reply,), (reply, reply), (other, reply)]):
        assert prompt_with_hint(codec, call(number, prompt, [9], [-1.0], messages=messages), "x") is None
    made = episode(call(0, [1, 2], [9], [-1.0], messages=(question, reply)))
    settings = DistillationConfig(teacher="self", hint="x")
    (row,), metrics = Distiller(settings, Scripted(-9.0), codec).assign_to(rows_of(made), [made])
    assert metrics["distillation/calls_without_hint"] == 1
    assert metrics["distillation/kl"] == 0
    assert row.teacher_advantages is not None
    assert not row.teacher_advantages.any()
    assert any("the teacher did not score 1 calls" in message for message in log)


@pytest.mark.parametrize(
    ("hint", "message"),
    [
        ("{solution}", r"has the field 'solution', which task t0 lacks; its fields: answer, explanation, main_query"),
        ("{answer", r"cannot be filled in: .*; write a field as \{answer\}"),
        ("{}", "cannot be filled in"),
    ],
)
def test_a_hint_with_an_unknown_field_is_an_error(hint: str, message: str):
    made = episode(call(0, [1], [2], [-1.0]))
    for check in (lambda: check_hint(hint, made.task), lambda: hint_text(hint, made)):
        with pytest.raises(ConfigError, match=message):
            check()


@pytest.mark.parametrize(
    ("settings", "run", "message"),
    [
        ({"teacher": "self"}, {}, "is self and there is no hint"),
        ({"teacher": "http://x"}, {"rollout": {"temperature": 0.7}}, "scores tokens at temperature 1, and rollout.te"),
        ({"teacher": "m"}, {"algorithm": "gspo"}, "the loss of gspo has one advantage per answer"),
        ({"teacher": "self", "hint": "x"}, {"backbone": "trinity"}, "which --backbone=trinity does not support"),
    ],
)
def test_contradictions_are_errors(tmp_path: Path, settings: dict[str, Any], run: dict[str, Any], message: str):
    values = {
        "backbone": run.get("backbone", "local"),
        "model": {"path": "m"},
        "task_reader": {"type": "seeds", "seeds": {"count": 4}},
        "rollout": {"agentscope_workflow": "a->B", **run.get("rollout", {"temperature": 1.0})},
        "trainer_common": {
            "algorithm": {"adv_estimator": run.get("algorithm", "grpo")},
            "distillation": settings,
        },
    }
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps({"astuner": values}))
    with pytest.raises(ConfigError, match=message):
        load_config(path)


class Watched(Optimizer):
    """Keeps the gradient of the step."""

    def step(self, step: int) -> float:
        self.gradient = torch.cat([parameter.grad.flatten() for parameter in self._parameters]).double()
        return super().step(step)


@pytest.mark.parametrize("pack", ["none", "tree"])
@pytest.mark.parametrize("reward_coef", [0.0, 0.3])
def test_the_gradient_is_that_of_the_reverse_kl(model_folder: Path, tokenizer: Any, pack: Any, reward_coef: float):
    """Against the gradient of mean((log π - log teacher - its mean) without gradient × log π), computed in float64."""
    config = AstunerConfig.model_validate(
        {
            "rollout": {"temperature": 1.0},
            "update": {"pack": pack},
            "trainer_common": {
                "algorithm": {"adv_estimator": "dr_grpo", "loss_agg_mode": "token-mean"},
                "distillation": {"teacher": "folder", "reward_coef": reward_coef},
                "use_kl_loss": False,
                "optim": {"lr": 1e-12},
            },
        }
    )
    policy = Policy(ModelConfig(), str(model_folder), torch.device("cpu"), pack)
    teacher_model = load_causal_lm(str(model_folder), torch.float32)
    with torch.no_grad():
        for parameter in teacher_model.parameters():
            parameter.mul_(1.2)
    double = load_causal_lm(str(model_folder), torch.float64)
    prompts, answers = [[5, 6, 7], [5, 6, 7]], [[8, 9, 10], [11, 12]]
    rewards, episodes, all_logprobs, differences = [1.0, 0.0], [], [], []
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids, first = prompt + answer, len(prompt)
        own = torch.log_softmax(double(input_ids=torch.tensor([ids])).logits[0], -1)
        with torch.no_grad():
            other = torch.log_softmax(teacher_model(input_ids=torch.tensor([ids])).logits[0].double(), -1)
        places = torch.arange(first, len(ids))
        logprobs = own[places - 1, torch.tensor(answer)]
        all_logprobs.append(logprobs)
        differences.append(other[places - 1, torch.tensor(answer)] - logprobs.detach())
        made = call(0, prompt, answer, logprobs.tolist())
        task = Task("t0", "?")
        samples = tuple(build_samples([made], "leaf"))
        episodes.append(Episode(f"e{number}", task, number, "ok", rewards[number], True, (made,), samples=samples))
    mean = torch.cat(differences).mean()
    loss = torch.zeros((), dtype=torch.float64)
    for reward, logprobs, difference in zip(rewards, all_logprobs, differences, strict=True):
        loss = loss - ((difference - mean + reward_coef * (reward - 0.5)) * logprobs).sum() / 5
    loss.backward()
    named = dict(double.named_parameters())
    expected = torch.cat([named[name].grad.flatten() for name, _ in policy.model.named_parameters()])
    optimizer = Watched(policy.trainable(), config.trainer_common.optim, 1)
    distiller = Distiller(
        config.trainer_common.distillation, ModelTeacher(teacher_model, 1000), ChatCodec(tokenizer, "qwen3")
    )
    update = PolicyUpdate(config, resolve(config.trainer_common.algorithm), policy, optimizer, distiller=distiller)
    result = update.step(episodes, 1)
    assert result.signal
    assert (optimizer.gradient - expected).norm() <= 1e-5 * expected.norm()
