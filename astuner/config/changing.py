"""Change a configuration from Python, with the checks that a file gets."""

from __future__ import annotations

from collections.abc import Mapping

from astuner.config.keys import parts
from astuner.config.problems import outermost_unknown, raise_problems, unknown_key
from astuner.config.root import RunConfig
from astuner.config.tree import set_at
from astuner.config.validation import validate


def with_values(config: RunConfig, values: Mapping[str, object]) -> RunConfig:
    """Return `config` with other values.

    Args:
        config: left as it is.
        values: dotted key (`astuner.model.path`) to value.

    Raises:
        ConfigError: a key is unknown or a value is not allowed.
    """
    paths = {parts(key): value for key, value in values.items()}
    raise_problems([unknown_key(path, "") for path in outermost_unknown(paths)])
    tree = config.model_dump()
    for path, value in paths.items():
        set_at(tree, path, value)
    changed, problems = validate(tree, {})
    raise_problems(problems)
    return changed
