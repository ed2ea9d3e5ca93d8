"""Measure how well a model plays Kuhn poker, exactly, from its probabilities of the actions.

    python -m tutorial.example_kuhn_poker.measure MODEL [MODEL ...]

Prints one line of JSON for each model: its exploitability in chips a game, the chips that it wins on average against a
uniform random and a scripted opponent (the mean of both positions), the probability of other answers than
those with the own card and a legal action, and the probability of betting or calling in each information set.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from astuner.model_tuner.codec import ChatCodec
from astuner.schema import Observation
from tutorial.example_kuhn_poker.kuhn_poker import (
    InformationSet,
    KuhnPoker,
    Policy,
    actions,
    answer_with,
    cautious,
    exploitability,
    information_sets,
    instruction_of,
    observations,
    uniform,
    value,
)


def policy_of(model: Path) -> tuple[dict[InformationSet, float], float]:
    """Return a model's policy at temperature 1, and the mean probability of other answers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    codec = ChatCodec(AutoTokenizer.from_pretrained(model))
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    environment = KuhnPoker()
    instruction = instruction_of(environment)
    policy, other = {}, []
    for info, seen in observations(environment.task_ids("train"), environment).items():
        prompt = codec.render(_conversation(instruction, seen, info), None)
        probabilities = [0.0, 0.0]
        for choice, action in zip(actions(seen[-1]), seen[-1].legal_actions, strict=True):
            answer = codec.encode(f"{answer_with(info[0], action)}<|im_end|>")
            with torch.no_grad():
                logits = network(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
            chosen = logits.log_softmax(-1)[range(len(answer)), list(answer)]
            probabilities[choice] = float(chosen.sum().exp())
        policy[info] = probabilities[1] / sum(probabilities)
        other.append(1 - sum(probabilities))
    return policy, sum(other) / len(other)


def _conversation(instruction: str, seen: list[Observation], info: InformationSet) -> list[dict]:
    """Return the messages of the agent loop; with two observations, the player has checked in between."""
    messages = [{"role": "user", "content": f"{instruction}\n\n{seen[0].text}"}]
    if len(seen) > 1:
        assert info[1] == "cb"
        messages += [
            {"role": "assistant", "content": answer_with(info[0], "[check]")},
            {"role": "user", "content": seen[1].text},
        ]
    return messages


def mean_value(policy: Policy, opponent: Policy) -> float:
    """Return the chips that a policy wins on average in a game, over both positions."""
    return (value(policy, opponent) - value(opponent, policy)) / 2


def measurements(model: Path) -> dict:
    """Return the measurements of a model."""
    policy, other = policy_of(model)
    return {
        "model": str(model),
        "exploitability": round(exploitability(policy), 4),
        "against_uniform": round(mean_value(policy, uniform()), 4),
        "against_cautious": round(mean_value(policy, cautious()), 4),
        "other": round(other, 4),
        "bet_or_call": {f"{card}{history}": round(policy[card, history], 3) for card, history in information_sets()},
    }


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(json.dumps(measurements(Path(argument))))
