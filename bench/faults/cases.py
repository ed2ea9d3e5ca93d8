"""The faults: where each was reported, how it is injected, and what the product has to say about it.

The words follow from the fault: what is wrong and what to change. They are not taken from the product's messages.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.faults import injections
from bench.faults.changes import (
    LLAMA,
    judge,
    keys,
    larger_vocabulary,
    other_vocabulary,
    patched,
    rows,
    several,
    shared_validation,
    template,
    tokenizer_config,
    without_system,
    without_tools,
    workflow,
)
from bench.faults.runs import Report, Run, math_run


@dataclass(frozen=True)
class Fault:
    """A fault of the benchmark.

    Attributes:
        name: its name in the result.
        source: a thread in which it, or a fault of its kind, was reported; "" if none is known.
        words: regular expressions that one message must match, all of them, in any order and case: those of what is
            wrong and those of what to change.
        change: changes an ordinary run so that it has the fault.
        other_forms: changes with other forms of the fault, which another check finds. Each has its own run. The fault
            is named if all its forms are.
        from_step: the step in which the fault has its first effect.
        steps: number of steps of the run.
    """

    name: str
    source: str
    words: tuple[str, ...]
    change: Callable[[Run], None]
    from_step: int = 1
    steps: int = 2
    other_forms: tuple[Callable[[Run], None], ...] = ()

    @property
    def runs(self) -> dict[str, Callable[[Path], Run]]:
        """A function for each form of the fault, which returns a run with it."""
        changes = (self.change, *self.other_forms)
        names = [self.name, *(f"{self.name} (form {number})" for number in range(2, len(changes) + 1))]
        return {name: partial(self._prepare, change) for name, change in zip(names, changes, strict=True)}

    def _prepare(self, change: Callable[[Run], None], folder: Path) -> Run:
        run = math_run(folder, self.steps)
        change(run)
        return run

    def named_in(self, report: Report) -> int | None:
        """Return the step in which the product named the fault; None if it did not."""
        steps = [step for step, _, text in report.findings if self._names(text)]
        if self._names(report.error) and not report.error.startswith("internal error"):
            steps.append(report.steps + 1)  # the step that the error ended
        return min(steps, default=None)

    def _names(self, text: str) -> bool:
        return all(re.search(word, text, re.IGNORECASE | re.DOTALL) for word in self.words)


FAULTS: tuple[Fault, ...] = (
    Fault(
        "tools_not_in_template",
        "https://github.com/ggml-org/llama.cpp/issues/27129",
        ("tool", "template", "never sees|not render|leaves? .*out"),
        template(without_tools),
    ),
    Fault(
        "tool_parser_never_fires",
        "https://github.com/vllm-project/vllm/issues/17161",
        ("tool call", "pars", "renderer|tool_parser"),
        keys(model__renderer={"name": "default", "tool_parser": "deepseek-v3"}),
        other_forms=(template(lambda text: text.replace("tool_call>", "call_of_tool>"), model__renderer="default"),),
    ),
    Fault(
        "answer_retokenised_by_client",
        "https://github.com/verl-project/verl/issues/3960",
        ("retokenised", "unchanged"),
        workflow("RetokenisedByClient"),
    ),
    Fault(
        "system_prompt_changes",
        "https://github.com/NousResearch/hermes-agent/issues/15866",
        ("system", "chang|another", "same"),
        workflow("SystemChanges"),
    ),
    Fault(
        "judge_gives_zero_to_all",
        "https://github.com/huggingface/trl/issues/3452",
        ("judge", "reference", "same reward|reward 0|lowest"),
        judge("GivesZero"),
    ),
    Fault(
        "judge_gives_zero_to_crashed",
        "https://github.com/NVIDIA-NeMo/Gym/pull/2015",
        ("crash", "reward|scored", "raise|leave|exception"),
        workflow("SwallowsCrash"),
    ),
    Fault(
        "judge_gives_nan",
        "https://github.com/modelscope/ms-swift/issues/8123",
        ("judge|reward", "nan", "division|empty|missing|finite"),
        judge("GivesNan"),
    ),
    Fault(
        "reward_column_is_text",
        "https://github.com/THUDM/slime/pull/2121",
        ("reward", "text|string|str", "number|float"),
        several(judge("ReadsRewardColumn"), rows(lambda _, row: {**row, "reward": "1.0"})),
    ),
    Fault(
        "validation_in_training",
        "https://github.com/miroblog/deep_rl_trader/issues/4",
        ("validation", "training", "remove|other data"),
        shared_validation,
    ),
    Fault(
        "mask_off_by_one",
        "https://github.com/verl-project/verl/pull/3287",
        ("mask", "off by one|shift", "bug|report|remove"),
        patched(injections.mask_off_by_one),
    ),
    Fault(
        "group_of_one",
        "https://github.com/ruc-datalab/DeepAnalyze/issues/116",
        ("num_repeat", "at least 2|4 or more", "compare"),
        keys(rollout__num_repeat=1),
    ),
    Fault(
        "advantages_of_another_batch",
        "https://github.com/PeterGriffinJin/Search-R1/issues/65",
        ("advantage", "reward", "other|another"),
        patched(injections.advantages_of_batch_before),
        from_step=2,
        steps=3,
    ),
    Fault(
        "stale_weights",
        "https://github.com/huggingface/trl/issues/3679",
        ("stale|old", "weights", "sync|transfer"),
        patched(injections.stale_weights),
        from_step=2,
        steps=3,
        other_forms=(patched(injections.weights_not_sent),),
    ),
    Fault(
        "wrong_chat_template",
        "https://github.com/unslothai/unsloth/issues/416",
        ("template", "wrong", "tokenizer|model.renderer"),
        template(lambda _: LLAMA),
    ),
    Fault(
        "end_token_never_sampled",
        "https://github.com/huggingface/trl/issues/1623",
        ("end|eos", "token", "eos_token|template"),
        several(
            template(lambda text: text.replace("<|im_end|>", "<|endoftext|>")),
            tokenizer_config({"eos_token": "<|endoftext|>"}),
        ),
    ),
    Fault(
        "every_answer_truncated",
        "https://github.com/huggingface/trl/pull/5759",
        ("truncated|cut", "all|every", "max_response_length_in_one_turn"),
        keys(rollout__max_response_length_in_one_turn=3),
    ),
    Fault(
        "greedy_training",
        "https://github.com/SkyworkAI/Skywork-OR1/issues/39",
        ("temperature", "greed|equal|same", "0\\.7|1\\.0|raise"),
        keys(rollout__temperature=0.0),
    ),
    Fault(
        "learning_rate_0",
        "https://github.com/unslothai/unsloth/issues/2824",
        ("lr", "0", "greater|raise|larger|positive"),
        keys(trainer_common__optim__lr=0.0),
        other_forms=(keys(trainer_common__optim__lr=1e-15), patched(injections.schedule_gives_zero)),
    ),
    Fault(
        "learning_rate_1000",
        "https://github.com/datawhalechina/hello-agents/issues/770",
        ("lr", "1000|0\\.5", "lower|at most"),
        keys(trainer_common__optim__lr=1000.0),
        other_forms=(keys(trainer_common__optim__lr=0.5),),
    ),
    Fault(
        "lora_not_attached",
        "https://github.com/huggingface/trl/issues/6700",
        ("lora|adapter", "no .*weight|not attached|nothing", "target_modules"),
        patched(injections.adapters_not_attached, model__lora__rank=8),
    ),
    Fault(
        "tokenizer_of_another_model",
        "https://github.com/huggingface/transformers/issues/12842",
        ("tokenizer", "model", "use|copy"),
        other_vocabulary,
        other_forms=(larger_vocabulary,),
    ),
    Fault(
        "logprobs_at_another_temperature",
        "https://github.com/huggingface/trl/issues/4159",
        ("logprob", "temperature", "rollout.temperature|processed_logprobs"),
        patched(injections.other_temperature, rollout__temperature=0.7),
    ),
    Fault(
        "doubled_bos",
        "https://github.com/huggingface/trl/issues/3853",
        ("bos|begin", "double|2|twice", "template|add_bos_token"),
        several(
            template(lambda text: "{{ bos_token }}{{ bos_token }}" + text),
            tokenizer_config({"bos_token": "<|endoftext|>"}),
        ),
        other_forms=(
            several(
                template(lambda text: "{{ bos_token }}{% if tools %}{{ bos_token }}{% endif %}" + text),
                tokenizer_config({"bos_token": "<|endoftext|>"}),
            ),
        ),
    ),
    Fault(
        "environment_never_advances",
        "https://github.com/silverlight6/TFTMuZeroAgent/pull/46",
        ("observation|environment", "same|equals", "step|advance"),
        workflow("FrozenWalk"),
    ),
    Fault(
        "cache_answers_other_prompt",
        "https://github.com/langchain-ai/langchain/issues/40403",
        ("cache", "prompt", "turn off|key"),
        patched(injections.cache_of_answers),
    ),
    Fault(
        "tool_always_fails",
        "https://github.com/PrimeIntellect-ai/verifiers/pull/1416",
        ("tool", "fail", "repair|fix|check|remove"),
        workflow("ToolAlwaysFails"),
    ),
    Fault(
        "seeds_all_equal",
        "https://github.com/thinking-machines-lab/tinker-feedback/issues/79",
        ("seed", "equal|same|identical", "own seed|different seed"),
        patched(injections.equal_seeds),
    ),
    Fault(
        "judge_gives_one_to_all",
        "https://github.com/Liuziyu77/Visual-RFT/issues/176",
        ("judge", "every|all", "reference"),
        judge("GivesOne"),
    ),
    Fault(
        "reward_is_inverted_or_random",
        "https://github.com/NVlabs/alpamayo-recipes/issues/29",
        ("invert|contradict|direction|different", "reward", "judge"),
        judge("Inverted"),
        other_forms=(judge("RandomReward"),),
    ),
    Fault(
        "system_prompt_not_in_template",
        "https://github.com/withcatai/node-llama-cpp/issues/624",
        ("system", "template", "renders?"),
        template(without_system),
    ),
    Fault(
        "results_of_tools_trained",
        "https://github.com/asuzukosi/post-training-experiments/issues/19",
        ("mask", "tool|not sample", "report|remove"),
        patched(injections.results_of_tools_trained),
    ),
    Fault(
        "end_tokens_not_trained",
        "https://github.com/huggingface/trl/pull/6357",
        ("mask", "miss|end", "padding|end token"),
        patched(injections.end_tokens_not_trained),
    ),
    Fault("workflow_ignores_task", "", ("prompt", "same", "main_query|task"), workflow("IgnoresTask")),
    Fault("answer_in_prompt", "", ("prompt", "answer", "leave|remove"), workflow("ShowsAnswer")),
    Fault(
        "prefix_cache_kept_over_update",
        "https://github.com/InternLM/lmdeploy/issues/4917",
        ("cache", "weights", "clear|reset"),
        patched(injections.prefix_cache_kept, trainer_common__total_epochs=3),
        from_step=2,
        steps=3,
    ),
    Fault(
        "no_gradient",
        "https://github.com/huggingface/trl/issues/3926",
        ("gradient", "0|zero", "trainable|mask|target_modules"),
        patched(injections.no_gradient),
    ),
    Fault(
        "optimizer_has_no_effect",
        "https://github.com/allenai/open-instruct/pull/1642",
        ("weight", "no .*changed|unchanged", "optimizer|lr"),
        patched(injections.optimizer_without_effect),
    ),
    Fault(
        "same_batch_every_step",
        "https://github.com/hpcaitech/ColossalAI/issues/3746",
        ("tasks", "same|repeat", "shuffle|order|reader"),
        patched(injections.same_batch),
        from_step=2,
        other_forms=(rows(lambda index, row: {**row, "question": f"What is 1 + {index % 4}?"}),),
    ),
    Fault(
        "adapters_not_sent_to_engine",
        "https://github.com/huggingface/trl/issues/3189",
        ("weights|adapter", "engine", "sync|transfer|merged"),
        patched(injections.adapters_not_sent, model__lora__rank=8, trainer_common__optim__lr=3e-3),
        from_step=2,
        steps=3,
    ),
    Fault(
        "references_are_missing",
        "https://github.com/mozilla-ai/lumigator/issues/620",
        ("answer", "empty|missing", "fill|remove"),
        rows(lambda index, row: {**row, "answer": row["answer"] if index % 4 == 0 else ""}),
    ),
)
