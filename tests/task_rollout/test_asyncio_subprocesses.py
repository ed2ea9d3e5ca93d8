"""Programs that an episode starts with asyncio, also where the event loop policy cannot watch them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.task_rollout.raising_code import run


class NoChildWatcher(asyncio.DefaultEventLoopPolicy):
    """As uvloop's policy, which Ray sets in the processes of its actors."""

    def get_child_watcher(self) -> Any:
        raise NotImplementedError


@pytest.fixture(params=[asyncio.DefaultEventLoopPolicy, NoChildWatcher], autouse=True)
def _policy(request: pytest.FixtureRequest) -> Iterator[None]:
    before = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(request.param())
    yield
    asyncio.set_event_loop_policy(before)


async def exits_with_output() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "print(6 * 7); raise SystemExit(3)", stdout=asyncio.subprocess.PIPE
    )
    assert ((await process.communicate())[0], process.returncode) == (b"42\n", 3)


async def shell_reads_its_input() -> None:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_shell("cat", stdin=pipe, stdout=pipe)
    assert (await process.communicate(b"text"))[0] == b"text"


async def is_killed_after_a_timeout() -> None:
    process = await asyncio.create_subprocess_exec("sleep", "600")
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(process.wait(), 0.1)
    process.kill()
    assert await process.wait() == -9


async def does_not_exist() -> None:
    with pytest.raises(FileNotFoundError):
        await asyncio.create_subprocess_exec("a_program_that_is_not_installed")


async def several_at_once() -> None:
    processes = [await asyncio.create_subprocess_exec("sh", "-c", f"exit {code}") for code in range(5)]
    assert await asyncio.gather(*(process.wait() for process in processes)) == [0, 1, 2, 3, 4]


def test_an_episode_runs_programs(tokenizer: Any):
    bodies = [exits_with_output, shell_reads_its_input, is_killed_after_a_timeout, does_not_exist, several_at_once]
    episodes = run(tokenizer, {body.__name__: body for body in bodies})
    assert {name: (episode.status, episode.error) for name, episode in episodes.items()} == {
        body.__name__: ("ok", None) for body in bodies
    }
