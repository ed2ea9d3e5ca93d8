"""Agents and judges with the faults that users' have."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

from astuner import ModelTuner, Workflow, WorkflowOutput, WorkflowTask, bp
from astuner.task_judge.judge_base import BaseJudge

released = threading.Event()
"""Ends what blocks, so that no thread outlives its test."""

# The run of a worker process. Found at its start: it may have ended when an episode signals it. A fork of the tests'
# server gets its number.
RUN = [psutil.Process(int(os.environ["RUN_PID"]))] if "RUN_PID" in os.environ else psutil.Process().parents()[1:2]


class Agent(Workflow):
    """One turn; the reward depends on the repeat, so that there is something to learn."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        await model_tuner.chat([{"role": "user", "content": workflow_task.task.main_query}])
        return WorkflowOutput(reward=float(workflow_task.repeat_index))


class OneInFour(Agent):
    """The second of four repeats goes wrong, as a subclass says."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        output = await super().execute(workflow_task, model_tuner)
        if workflow_task.repeat_index != 1:
            return output
        return await self.go_wrong(model_tuner)

    async def go_wrong(self, model_tuner: ModelTuner) -> Any:
        raise NotImplementedError


class Raises(OneInFour):
    async def go_wrong(self, model_tuner: ModelTuner) -> Any:
        raise RuntimeError("the environment [/bold] broke down")


class HangsAwaiting(OneInFour):
    async def go_wrong(self, model_tuner: ModelTuner) -> Any:
        await asyncio.sleep(1e6)


class HangsBlocking(OneInFour):
    async def go_wrong(self, model_tuner: ModelTuner) -> Any:
        released.wait()


class SwallowsItsCancellation(OneInFour):
    async def go_wrong(self, model_tuner: ModelTuner) -> Any:
        try:
            await asyncio.sleep(1e6)
        except asyncio.CancelledError:
            return WorkflowOutput(reward=1.0)


class ReturnsRubbish(OneInFour):
    async def go_wrong(self, model_tuner: ModelTuner) -> Any:
        return 0.5


class RewardIsNan(OneInFour):
    async def go_wrong(self, model_tuner: ModelTuner) -> Any:
        return WorkflowOutput(reward=float("nan"))


class LogsRubbish(OneInFour):
    async def go_wrong(self, model_tuner: ModelTuner) -> Any:
        return WorkflowOutput(reward=1.0, log_metrics={"length": "short"})  # type: ignore[dict-item]


class Exits(OneInFour):
    async def go_wrong(self, model_tuner: ModelTuner) -> Any:
        sys.exit(3)


class InterruptsItself(OneInFour):
    async def go_wrong(self, model_tuner: ModelTuner) -> Any:
        raise KeyboardInterrupt


class CancelsItself(OneInFour):
    async def go_wrong(self, model_tuner: ModelTuner) -> Any:
        raise asyncio.CancelledError


class AsksTooLong(OneInFour):
    async def go_wrong(self, model_tuner: ModelTuner) -> Any:
        return await model_tuner.chat([{"role": "user", "content": "1 2 " * 300}])


class AsksNonsense(OneInFour):
    async def go_wrong(self, model_tuner: ModelTuner) -> Any:
        return await model_tuner.chat("hello")  # type: ignore[arg-type]


class GoesAsTheQuestionSays(OneInFour):
    """The question has a word for each repeat: the class of this file whose `go_wrong` ends the episode, or Agent."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        output = await Agent.execute(self, workflow_task, model_tuner)
        kind = globals()[workflow_task.task.main_query.split()[workflow_task.repeat_index]]
        return output if kind is Agent else await kind.go_wrong(self, model_tuner)


class StrangeMetadata(OneInFour):
    async def go_wrong(self, model_tuner: ModelTuner) -> Any:
        loop: dict[Any, Any] = {1: object(), "set": {1, 2}}
        loop["itself"] = loop
        return WorkflowOutput(reward=0.5, metadata=loop)


class StopsAtTags(Agent):
    """Has two breakpoints, one of which the test enables."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        answer = 6 * 7 + workflow_task.repeat_index  # noqa: F841 for the debugger to read
        bp("NOT_ASKED_FOR")
        bp("HERE")
        return await super().execute(workflow_task, model_tuner)


class HangsUntilReleased(Agent):
    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        output = await super().execute(workflow_task, model_tuner)
        while not Path("released").exists():
            await asyncio.sleep(0.05)
        return output


class InTheMainThread(Agent):
    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        await super().execute(workflow_task, model_tuner)
        is_worker = psutil.Process().name() == "astuner-worker"
        return WorkflowOutput(reward=float(threading.current_thread() is threading.main_thread() and not is_worker))


class AsksNobody(Workflow):
    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        return WorkflowOutput(reward=1.0)


class AlwaysRaises(Agent):
    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        await super().execute(workflow_task, model_tuner)
        raise KeyError("answer")


class FailsInValidation(Agent):
    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        if workflow_task.is_validation:
            raise RuntimeError("no validation today")
        return await super().execute(workflow_task, model_tuner)


class Unscored(Agent):
    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        output = await super().execute(workflow_task, model_tuner)
        return WorkflowOutput(metadata={"repeat": output.reward})


class AlwaysEqual(Agent):
    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        output = await super().execute(workflow_task, model_tuner)
        return WorkflowOutput(reward=0.0, metadata=output.metadata)


class TellsSecrets(Agent):
    """Spreads the keys of its environment in every way that it has."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        keys = " ".join(os.environ[name] for name in ("OPENAI_API_KEY", "HF_TOKEN", "DASHSCOPE_API_KEY"))
        print("printed", keys)
        print("to stderr", keys, file=sys.stderr)
        if workflow_task.repeat_index == 1:
            raise RuntimeError(f"401: {keys} is not allowed")
        await model_tuner.chat([{"role": "user", "content": keys}])
        return WorkflowOutput(
            reward=float(workflow_task.repeat_index), metadata={"keys": keys, keys: 1}, log_metrics={keys: 1.0}
        )


class Signals(Agent):
    """Sends the run one signal, in the first episode whose id begins as the environment says."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        if workflow_task.episode_id.startswith(os.environ.get("SIGNAL_AT", "never")):
            with contextlib.suppress(FileExistsError):
                Path("signalled").touch(exist_ok=False)  # by one of the workers
                RUN[0].send_signal(signal.Signals[os.environ["SIGNAL"]])
        return await super().execute(workflow_task, model_tuner)


class AsksServices(Agent):
    """Fails unless every service of the environment's SERVICES answers."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        async with httpx.AsyncClient(trust_env=False) as client:
            for url in os.environ["SERVICES"].split():
                (await client.get(url)).raise_for_status()
        return await super().execute(workflow_task, model_tuner)


class HangsFromTheStart(Agent):
    """Never ends."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        await asyncio.sleep(1e6)
        return await super().execute(workflow_task, model_tuner)


class IsAbstract(Workflow):
    pass


class NoWorkflow:
    pass


class _Judge(BaseJudge):
    def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Any:
        if workflow_task.repeat_index != 1:
            return float(workflow_task.repeat_index), True
        return self.go_wrong()

    def go_wrong(self) -> Any:
        raise NotImplementedError


class JudgeRaises(_Judge):
    def go_wrong(self) -> Any:
        raise ZeroDivisionError("division by zero")


class JudgeHangs(_Judge):
    def go_wrong(self) -> Any:
        released.wait()


class JudgeHangsAwaiting(_Judge):
    def go_wrong(self) -> Any:
        return asyncio.sleep(1e6)


class JudgeReturnsRubbish(_Judge):
    def go_wrong(self) -> Any:
        return "good", 7


class JudgeExits(_Judge):
    def go_wrong(self) -> Any:
        sys.exit(0)


class JudgesAsTheQuestionSays(_Judge):
    """As the agent; a repeat without a word is judged well."""

    def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Any:
        words = dict(enumerate(workflow_task.task.main_query.split()))
        if (word := words.get(workflow_task.repeat_index)) is None:
            return float(workflow_task.repeat_index), True
        return globals()[word].go_wrong(self)


class AlwaysWrong(BaseJudge):
    def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Any:
        return 1 / 0


class StopsAtATag(BaseJudge):
    """A plain function, which is run in a thread and so may run an event loop."""

    def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Any:
        repeat = workflow_output.metadata["repeat"]
        bp("HERE")
        return asyncio.run(asyncio.sleep(0, result=repeat))


class JudgeCannotBeMade(_Judge):
    def __init__(self, config: Any) -> None:
        raise RuntimeError("the grader's address is not set")


def broken_function() -> str:
    """A function that should make a model."""
    time.sleep(0)
    raise ValueError("the disk was not found")
