"""Agents that fail, hang, start or kill processes, or stop at breakpoints."""

from __future__ import annotations

import asyncio
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import psutil
from loguru import logger

from astuner import ModelTuner, Workflow, WorkflowOutput, WorkflowTask
from astuner.debugging.breakpoints import bp
from astuner.sandbox import run_python_program
from astuner.system.process_tree import environment_variable
from astuner.task_judge.judge_base import BaseJudge


class Letters(Workflow):
    """Two turns. The reward is the share of letters in the output, which a random model learns to increase."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        messages = [{"role": "user", "content": workflow_task.task.main_query}]
        output = ""
        for _ in range(2):
            answer = await model_tuner.chat(messages)
            text = answer.parsed.content
            output += text
            messages += [{"role": "assistant", "content": text}, {"role": "tool", "content": "continue"}]
        share = sum(char.isalpha() for char in output) / max(len(output), 1)
        return WorkflowOutput(reward=share, is_success=share > 0.5, metadata={"output": output})


class StartsAProgram(Letters):
    """Starts a program, and leaves the reward to the judge."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        process = await asyncio.create_subprocess_exec("true")
        assert await process.wait() == 0
        return replace(await super().execute(workflow_task, model_tuner), reward=None, is_success=None)


class ComputesInASandbox(BaseJudge):
    """Computes the share of letters with a program in the sandbox."""

    async def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> tuple[float, bool]:
        text = workflow_output.metadata["output"]
        code = f"text = {text!r}; print(sum(map(str.isalpha, text)) / max(len(text), 1))"
        share = float((await run_python_program(code, 60.0)).stdout)
        return share, share > 0.5


class ExtremeRewards(Letters):
    """From the second step on, rewards are as large as they can be."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        output = await super().execute(workflow_task, model_tuner)
        if workflow_task.episode_id.startswith("train-000001"):
            return output
        return WorkflowOutput(reward=1e308 if workflow_task.repeat_index % 2 else -1e308)


def actor_process(class_name: str) -> psutil.Process:
    """Return the process of this test's only actor of Ray whose class has this name, with any prefix."""
    (actor,) = (
        process
        for process in psutil.process_iter(["cmdline"])
        if re.match(rf"ray::\w*{class_name}", " ".join(process.info["cmdline"] or ()))
        if environment_variable(process, "SHARED_FOLDER") == os.environ["SHARED_FOLDER"]
    )
    return actor


def first_time(event: str) -> bool:
    """Return True at the first call with `event`, over all processes and runs that share SHARED_FOLDER."""
    try:
        (Path(os.environ["SHARED_FOLDER"]) / event).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class EpisodeFailures(Letters):
    """Step 1: an episode raises and one hangs. Step 2: a task and all of validation fail, and a host dies."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        split, step, *_ = workflow_task.episode_id.split("-")
        at = split, int(step), workflow_task.repeat_index
        if at == ("train", 1, 1):
            raise RuntimeError("the environment failed")
        if at == ("train", 1, 2) and first_time("hang"):
            await super().execute(workflow_task, model_tuner)
            await asyncio.sleep(1000)
        if at[:2] == ("train", 2) and not workflow_task.task.metadata["unlucky"]:
            raise RuntimeError("this task never works")
        if at == ("train", 2, 0) and first_time("host"):
            actor_process("EpisodeHost").kill()
            await asyncio.sleep(60)
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
    """Hangs in every training episode of an unlucky task."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        output = await super().execute(workflow_task, model_tuner)
        if workflow_task.episode_id.startswith("train-") and workflow_task.task.metadata["unlucky"]:
            await asyncio.sleep(1000)
        return output


class EngineDies(Letters):
    """Kills the rollout engine in step 3, once."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        if workflow_task.episode_id.startswith("train-000003-") and first_time("engine"):
            actor_process("EmbeddedServer").kill()
        return await super().execute(workflow_task, model_tuner)


class ExtremeRewardsOrDeadEngine(ExtremeRewards, EngineDies):
    """Has extreme rewards where EXTREME_REWARDS is set, and otherwise kills the engine."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        agent = ExtremeRewards if "EXTREME_REWARDS" in os.environ else EngineDies
        return await agent.execute(self, workflow_task, model_tuner)


class EngineCoreDies(Letters):
    """Kills vLLM's EngineCore process in step 2, once; the server's actor stays alive."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        if workflow_task.episode_id.startswith("train-000002-") and first_time("core"):
            cores = [process for process in psutil.process_iter(["name"]) if is_core_of_this_test(process)]
            assert len(cores) == 1
            cores[0].kill()
        return await super().execute(workflow_task, model_tuner)


def is_core_of_this_test(process: psutil.Process) -> bool:
    """Return whether a process is an EngineCore of vLLM that the same test has started."""
    try:
        name = process.name()
    except psutil.Error:
        return False
    mark = environment_variable(process, "ASTUNER_TEST_MARK")
    return "EngineCor" in name and mark == os.environ["ASTUNER_TEST_MARK"]


def raylet() -> psutil.Process:
    """Return Ray's process of this node; the actor was not forked by a `WorkerServer`."""
    (found,) = (process for process in psutil.Process().parents() if process.name() == "raylet")
    return found


class KillsAProcess(Workflow):
    """In the second repeat of the unlucky task, kills its process in the first step, and its host in the second."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        (Path(os.environ["SHARED_FOLDER"]) / f"{workflow_task.episode_id}.{uuid4().hex}").touch()
        if (workflow_task.task.task_id, workflow_task.repeat_index) == ("unlucky", 1):
            await asyncio.sleep(1)  # other episodes end first
            is_first_step = workflow_task.episode_id.startswith("train-000001-")
            (psutil.Process() if is_first_step else actor_process("EpisodeHost")).kill()
            await asyncio.sleep(60)
        raise RuntimeError("this agent calls no engine")


class ExitsItsProcess(Letters):
    """Ends its process in step 2, in the first episode of each unlucky task, whenever it runs."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        is_fatal = workflow_task.task.metadata["unlucky"] and workflow_task.repeat_index == 0
        if workflow_task.episode_id.startswith("train-000002-") and is_fatal:
            os._exit(0)
        return await super().execute(workflow_task, model_tuner)


class PrintsSecrets(Letters):
    """Prints and logs its node's API key, and records when and on which node it ran."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        key, start = os.environ["NODE_API_KEY"], time.time()
        print("the key is", key, flush=True)
        logger.warning("the key is {}", key)
        output = await super().execute(workflow_task, model_tuner)
        with (Path(os.environ["SHARED_FOLDER"]) / "ran").open("a") as file:
            file.write(f"{start} {time.time()} {raylet().pid}\n")
        if workflow_task.repeat_index == 3:
            raise RuntimeError(f"rejected: {key}")
        return replace(output, metadata={"key": key})


class HasABreakpoint(Letters):
    """Stops at a breakpoint with `--db=HERE`."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        output = await super().execute(workflow_task, model_tuner)
        text = output.metadata["output"]
        bp("HERE")
        return replace(output, metadata={"length": len(text)})


class WaitsForAFile(Workflow):
    """Writes its host's process id, and continues as soon as the file `continue` exists."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        folder = Path(os.environ["SHARED_FOLDER"])
        (folder / "process").write_text(str(actor_process("EpisodeHost").pid))
        while not (folder / "continue").exists():
            await asyncio.sleep(0.05)  # waits here
        return WorkflowOutput(reward=1.0)


class WaitsOnItsNode(Workflow):
    """Records on which node it runs, and continues as soon as the file `continue` exists."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        folder = Path(os.environ["SHARED_FOLDER"])
        (node,) = (word.partition("=")[2] for word in raylet().cmdline() if word.startswith("--node_ip_address="))
        (folder / f"{workflow_task.episode_id}.{uuid4().hex}.ran").write_text(node)
        while not (folder / "continue").exists():
            await asyncio.sleep(0.05)
        return WorkflowOutput(reward=1.0)
