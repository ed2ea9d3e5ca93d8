"""Texts of the exceptions of user code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from astuner.errors import describe_error

FIX = "; write `await` in front of the call that returned the coroutine"


async def answer() -> str:
    return "4"


@pytest.mark.parametrize(
    "use",
    [lambda made: made.text, lambda made: made["text"], len, float, lambda made: "is " + made],
)
def test_a_coroutine_that_is_used_as_its_result(use: Callable[[Any], object]) -> None:
    made = answer()
    with pytest.raises((AttributeError, TypeError)) as caught:
        use(made)
    made.close()
    assert describe_error(caught.value).endswith(FIX)


def test_other_errors_have_no_advice() -> None:
    assert describe_error(AttributeError("'str' object has no attribute 'text'")).endswith("attribute 'text'")
    assert describe_error(ValueError("'coroutine'")) == "ValueError: 'coroutine'"
