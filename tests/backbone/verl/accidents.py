"""Agents to which things happen, once or always."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import psutil
from loguru import logger

from astuner import ModelTuner, Workflow, WorkflowOutput, WorkflowTask
from astuner.breakpoints import bp


class Letters(Workflow):
    """Two turns; the reward is the share of letters in what the model says, which a random model learns to raise."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        messages = [{"role": "user", "content": workflow_task.task.main_query}]
        said = ""
        for _ in range(2):
            answer = await model_tuner.chat(messages)
            text = answer.parsed.content
            said += text
            messages += [{"role": "assistant", "content": text}, {"role": "tool", "content": "go on"}]
        share = sum(char.isalpha() for char in said) / max(len(said), 1)
        return WorkflowOutput(reward=share, is_success=share > 0.5, metadata={"said": said})


def first_time(what: str) -> bool:
    """Whether nobody has asked for this before, in any process of any run that shares ACCIDENTS."""
    try:
        (Path(os.environ["ACCIDENTS"]) / what).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class EpisodeAccidents(Letters):
    """In step 1 an episode raises and one hangs; in step 2 a task fails, a worker dies, and so does all validation."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        split, step, *_ = workflow_task.episode_id.split("-")
        at = split, int(step), workflow_task.repeat_index
        if at == ("train", 1, 1):
            raise RuntimeError("the environment broke down")
        if at == ("train", 1, 2) and first_time("hang"):
            await super().execute(workflow_task, model_tuner)
            await asyncio.sleep(1000)
        if at[:2] == ("train", 2) and not workflow_task.task.metadata["unlucky"]:
            raise RuntimeError("this task never works")
        if at == ("train", 2, 0) and first_time("worker"):
            os.kill(os.getpid(), signal.SIGKILL)
        if at[:2] == ("val", 2):
            raise RuntimeError("validation never works")
        return await super().execute(workflow_task, model_tuner)


class SecondStepFails(Letters):
    """No episode of step 2 has a reward."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        if workflow_task.episode_id.startswith("train-000002-"):
            raise RuntimeError("the environment is down")
        return await super().execute(workflow_task, model_tuner)


class UnluckyHang(Letters):
    """Of a training task that is unlucky no episode ends."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        output = await super().execute(workflow_task, model_tuner)
        if workflow_task.episode_id.startswith("train-") and workflow_task.task.metadata["unlucky"]:
            await asyncio.sleep(1000)
        return output


class EngineAccident(Letters):
    """In step 3 the rollout engine dies, once."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        if workflow_task.episode_id.startswith("train-000003-") and first_time("engine"):
            import ray

            ray.kill(ray.get_actor("astuner_embedded_0"))
        return await super().execute(workflow_task, model_tuner)


class CoreAccident(Letters):
    """In step 2 the process in which vLLM computes dies, once; the actor around it lives."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        if workflow_task.episode_id.startswith("train-000002-") and first_time("core"):
            cores = [process for process in psutil.process_iter(["name"]) if is_core_of_this_run(process)]
            assert len(cores) == 1
            cores[0].kill()
        return await super().execute(workflow_task, model_tuner)


def is_core_of_this_run(process: psutil.Process) -> bool:
    """Whether it is an EngineCore of vLLM's that the same test has started."""
    try:
        mark = process.environ().get("ASTUNER_TEST_MARK")
        return "EngineCor" in process.name() and mark == os.environ["ASTUNER_TEST_MARK"]
    except psutil.Error:
        return False


class Deadly(Workflow):
    """Ends its process whenever one of its episodes is of the unlucky task's second repeat."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        (Path(os.environ["ACCIDENTS"]) / f"{workflow_task.episode_id}.{uuid4().hex}").touch()
        if (workflow_task.task.task_id, workflow_task.repeat_index) == ("unlucky", 1):
            await asyncio.sleep(1)  # others end before
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("no engine is asked here")


class TellsSecrets(Letters):
    """Says its node's key to whoever listens, and leaves a line of when and where it ran."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        import ray

        key, began = os.environ["NODE_API_KEY"], time.time()
        print("the key is", key, flush=True)
        logger.warning("the key is {}", key)
        output = await super().execute(workflow_task, model_tuner)
        with (Path(os.environ["ACCIDENTS"]) / "ran").open("a") as file:
            file.write(f"{began} {time.time()} {ray.get_runtime_context().get_node_id()}\n")
        if workflow_task.repeat_index == 3:
            raise RuntimeError(f"refused: {key}")
        return replace(output, metadata={"key": key})


class StopsAtATag(Letters):
    """Stops where `--db=HERE` says."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        output = await super().execute(workflow_task, model_tuner)
        said = output.metadata["said"]
        bp("HERE")
        return replace(output, metadata={"length": len(said)})


class WaitsForASign(Workflow):
    """Leaves its process's number, and goes on once there is a sign."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        folder = Path(os.environ["ACCIDENTS"])
        (folder / "process").write_text(str(os.getpid()))
        while not (folder / "sign").exists():
            await asyncio.sleep(0.05)  # here it stands
        return WorkflowOutput(reward=1.0)
