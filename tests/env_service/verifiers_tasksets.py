"""A taskset of verifiers for the tests: a question, or a tool and a question. Runs in another interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class AddTools(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b


class SumTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()
    has_tools: bool = False


class SumTask(vf.Task[SumData, vf.State, SumTaskConfig]):
    @classmethod
    def toolsets(cls, config: SumTaskConfig) -> list[vf.Toolset]:
        return [AddTools(config.tools)] if config.has_tools else []

    @vf.reward(weight=2.0)
    async def correct(self, task: SumData, trace: vf.Trace) -> float:
        return float(trace.last_reply == task.answer)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class SumConfig(vf.TasksetConfig):
    task: SumTaskConfig = SumTaskConfig()
    first: int = 0


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self) -> Iterator[SumTask]:
        print("this line is not an answer")
        for number in range(self.config.first, self.config.first + 5):
            data = SumData(prompt=f"What is {number} + 1?", system_prompt="Be brief.", answer=str(number + 1))
            yield SumTask(data, self.config.task)


__all__ = ["SumTaskset"]


if __name__ == "__main__":
    AddTools.run()
