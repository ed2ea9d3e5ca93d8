"""Stacks of tasks and threads, as reports of hanging code show them."""

from __future__ import annotations

import asyncio
import threading
import time

from astuner.debugging.tracebacks import format_stack, task_stack, thread_stack


async def waits(released: asyncio.Event) -> None:
    await goes_deeper(released)


async def goes_deeper(released: asyncio.Event) -> None:
    await released.wait()


async def test_a_waiting_task_is_followed_down_to_what_it_awaits():
    released = asyncio.Event()
    task = asyncio.create_task(waits(released))
    await asyncio.sleep(0)
    assert [frame.name for frame in task_stack(task, threading.current_thread())] == ["waits", "goes_deeper", "wait"]
    assert "await released.wait()" in format_stack(task_stack(task, threading.current_thread()))
    released.set()
    await task
    assert "it has just ended" in format_stack(task_stack(task, threading.current_thread()))


def test_a_task_that_blocks_its_thread_has_the_stack_of_the_thread():
    released, tasks = threading.Event(), []

    async def blocks() -> None:
        tasks.append(asyncio.current_task())
        released.wait(30)

    thread = threading.Thread(target=lambda: asyncio.run(blocks()))
    thread.start()
    while not tasks:
        time.sleep(0.01)
    stack = task_stack(tasks[0], thread)
    assert stack[0].name == "blocks"
    assert stack[-1].filename == threading.__file__
    released.set()
    thread.join()
    assert thread_stack(thread) == ()
