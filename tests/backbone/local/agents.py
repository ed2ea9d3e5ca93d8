"""Small agents and judges for tests of whole runs."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal

import psutil

from astuner import AgentStep, ModelTuner, Workflow, WorkflowOutput, WorkflowTask, discounted_returns
from astuner.errors import UnscoredError
from astuner.task_judge.judge_base import BaseJudge

# The run of a worker process. Found at its start: it may have ended when an episode signals it. A fork of the tests'
# server gets its number.
RUN = [psutil.Process(int(os.environ["RUN_PID"]))] if "RUN_PID" in os.environ else psutil.Process().parents()[1:2]


class Letters(Workflow):
    """Two turns; the reward is the share of letters in what the model says, which a random model learns to raise."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        messages = [{"role": "user", "content": workflow_task.task.main_query}]
        answer_text = ""
        for _ in range(2):
            answer = await model_tuner.chat(messages)
            text = answer.parsed.content
            answer_text += text
            messages += [{"role": "assistant", "content": text}, {"role": "tool", "content": "go on"}]
        share = sum(char.isalpha() for char in answer_text) / max(len(answer_text), 1)
        return WorkflowOutput(reward=share, is_success=share > 0.5, log_metrics={"characters": len(answer_text)})


class ArrivesAnyTime(Letters):
    """Episodes reach the engine in another order each time, and ask for two answers at once."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        await asyncio.sleep(random.SystemRandom().uniform(0.0, 0.05))
        messages = [{"role": "user", "content": workflow_task.task.main_query}]
        await asyncio.gather(model_tuner.chat(messages), model_tuner.chat([{"role": "user", "content": "hello"}]))
        return await super().execute(workflow_task, model_tuner)


class Answers(Workflow):
    """One answer, which the judge scores."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        answer = await model_tuner.chat([{"role": "user", "content": workflow_task.task.main_query}])
        return WorkflowOutput(metadata={"final_answer": answer.parsed.content})


class CountsLetters(BaseJudge):
    """The reward is the number of letters; the first episode of each group cannot be scored."""

    def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> tuple[float, bool]:
        if workflow_task.repeat_index == 0 and not workflow_task.is_validation:
            raise UnscoredError("the service is busy", "busy")
        letters = sum(char.isalpha() for char in workflow_output.metadata["final_answer"])
        return float(letters), letters > 0


class MixesTemperatures(Workflow):
    """Several answers to one prompt, and a further turn, each at another temperature."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        messages = [{"role": "user", "content": workflow_task.task.main_query}]
        answer = await model_tuner.chat(messages, temperature=1.8)
        await model_tuner.chat(messages, temperature=0.4)
        messages += [answer.call.messages[-1], {"role": "tool", "content": "go on"}]
        last = await model_tuner.chat(messages, temperature=0.6, n=2)
        text = answer.parsed.content + last.parsed.content
        return WorkflowOutput(reward=sum(char.isalpha() for char in text) / max(len(text), 1))


class TenthCrashes(Letters):
    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        if workflow_task.repeat_index == 1 and workflow_task.task.metadata.get("unlucky"):
            raise RuntimeError("the environment broke down")
        return await super().execute(workflow_task, model_tuner)


class AlwaysCrashes(Letters):
    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        raise RuntimeError("typo in the agent")


class NeverLearns(Letters):
    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        output = await super().execute(workflow_task, model_tuner)
        return WorkflowOutput(reward=0.0, metadata=output.metadata)


class HalfLearns(Letters):
    """Every second task is always solved."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        output = await super().execute(workflow_task, model_tuner)
        if workflow_task.task.metadata["unlucky"]:
            return WorkflowOutput(reward=1.0)
        return output


class SolvesAtAnyLength(Letters):
    """Always solved, in one turn or two."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        if workflow_task.repeat_index % 2:
            await model_tuner.chat([{"role": "user", "content": workflow_task.task.main_query}])
        else:
            await super().execute(workflow_task, model_tuner)
        return WorkflowOutput(reward=1.0)


class SolvesSomeAtAnyLength(SolvesAtAnyLength):
    """Some tasks are always solved, the others are `Letters`."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        home = SolvesAtAnyLength if workflow_task.task.metadata["unlucky"] else Letters
        return await home.execute(self, workflow_task, model_tuner)


class KilledAtStep(Letters):
    """Kills the whole process at the training step that the environment names."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        if workflow_task.episode_id.startswith(f"train-{int(os.environ.get('KILL_AT', '0')):06d}-"):
            RUN[0].send_signal(int(os.environ.get("KILL_WITH", str(int(signal.SIGKILL)))))
        return await super().execute(workflow_task, model_tuner)


class ExtremeRewards(Letters):
    """From the second step on, rewards are as large as they can be."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        output = await super().execute(workflow_task, model_tuner)
        if workflow_task.episode_id.startswith("train-000001"):
            return output
        return WorkflowOutput(reward=1e308 if workflow_task.repeat_index else -1e308)


class RemovesTheRecord(Letters):
    """Removes the record during the second step."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        if workflow_task.episode_id.startswith("train-000002"):
            shutil.rmtree(os.environ["RECORD_TO_REMOVE"], ignore_errors=True)
        return await super().execute(workflow_task, model_tuner)


class SomeEqual(Workflow):
    """One answer; the rewards of a group differ unless its task is unlucky."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        await model_tuner.chat([{"role": "user", "content": workflow_task.task.main_query}])
        return WorkflowOutput(
            reward=0.0 if workflow_task.metadata["unlucky"] else float(workflow_task.repeat_index % 2)
        )


class Rooms(Workflow):
    """Two answers in two rooms. The reward of each is the share of letters in it."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        rewards, messages = [], [{"role": "user", "content": workflow_task.task.main_query}]
        for _ in range(2):
            text = (await model_tuner.chat(messages)).parsed.content
            rewards.append(sum(char.isalpha() for char in text) / max(len(text), 1))
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]
        returns = discounted_returns(rewards, 0.9)
        steps = [AgentStep(f"room {room}", value) for room, value in enumerate(returns)]
        return WorkflowOutput(reward=sum(rewards), steps=steps)
