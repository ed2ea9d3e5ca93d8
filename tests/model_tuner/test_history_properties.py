"""For any change of the history: an unchanged history is extended exactly, a changed one records a fork."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from astuner.errors import WorkflowError
from tests.examples import examples
from tests.model_tuner.templates import FAMILIES, Family
from tests.model_tuner.test_continuation import THOUGHT, Agent, user

TEXTS = st.text("ab \n.<>|é三", min_size=1, max_size=6)
STEPS = st.lists(st.tuples(st.sampled_from(["none", "none", "trim", "edit", "drop", "system"]), TEXTS), max_size=5)


@given(st.sampled_from(FAMILIES), st.lists(TEXTS, min_size=6, max_size=6), STEPS, st.booleans(), st.integers(3, 40))
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_history(
    tokenizer: Any,
    family: Family,
    answers: Sequence[str],
    steps: Sequence[tuple[str, str]],
    thinks: bool,
    max_tokens: int,
):
    completions = [(THOUGHT if thinks else "") + text + family.stop for text in answers]
    agent = Agent(family, tokenizer, *completions, max_tokens=max_tokens)
    asyncio.run(_converse(agent, steps, thinks))


async def _converse(agent: Agent, steps: Sequence[tuple[str, str]], thinks: bool) -> None:
    last = await agent.ask(user("Hi"))
    changed = False
    for what, text in steps:
        changed |= what != "none"
        _change(agent, what, text)
        try:
            call = await agent.ask(user(text))
        except WorkflowError:  # the template rejects the remaining messages
            return
        if call.fork is not None:
            agent.cause(call)
            assert changed or thinks
        elif not changed:
            agent.suffix(last, call)
        agent.check()
        last = call


def _change(agent: Agent, what: str, text: str) -> None:
    history = agent.messages
    if what == "trim":
        history[-1] = {**history[-1], "content": history[-1]["content"].strip()}
    elif what == "edit":
        history[-1] = {**history[-1], "content": text}
    elif what == "drop":
        del history[: 2 if len(history) > 2 else 0]
    elif what == "system":
        history.insert(0, {"role": "system", "content": text})
