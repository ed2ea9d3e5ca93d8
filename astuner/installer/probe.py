"""Print as JSON which packages an environment has and whether modules import there.

Runs as a script in the environment's interpreter, with the standard library only. The arguments are the modules to
import. A module that ends in `?` is skipped if it is not installed.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import runpy
import sys
import warnings
from pathlib import Path


def main() -> None:
    """Write the result to standard output; discard everything that imported modules print."""
    stdout = os.dup(1)
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.dup2(devnull, 2)
    # The first distribution of a name counts, as for imports. One whose removal was interrupted has no name.
    distributions = {str(d.metadata["Name"]): d for d in reversed(list(importlib.metadata.distributions())) if d.name}
    torch = next((file for path in sys.path if (file := Path(path, "torch", "version.py")).is_file()), None)
    result = {
        "python": platform.python_version(),
        "prefix": sys.prefix,
        "installed": {name: d.version for name, d in distributions.items()},
        "requires": {name: d.requires or [] for name, d in distributions.items()},
        # Read from the file, because a broken PyTorch does not import.
        "cuda": torch and (runpy.run_path(str(torch)).get("cuda") or None),
        "import_errors": {name.rstrip("?"): error for name in sys.argv[1:] if (error := _import_error(name))},
    }
    with os.fdopen(stdout, "w") as stream:
        json.dump(result, stream)


def _import_error(name: str) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if name.endswith("?") and importlib.util.find_spec(name[:-1]) is None:
                return ""
            importlib.import_module(name.rstrip("?"))
        except BaseException as error:  # a broken package may raise anything
            return f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return ""


if __name__ == "__main__":
    main()
