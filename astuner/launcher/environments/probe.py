"""Run by the interpreter of an environment: says, as JSON, what is installed there and whether it imports.

It is run as a file, with nothing but the standard library to rely on. Its arguments are modules to import; one that
ends in `?` is passed over where it is not installed.
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
    """Write the answer to standard output, and whatever modules print when they are imported nowhere."""
    answer_to = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    # The first found of a name counts, as for an import.
    found = reversed(list(importlib.metadata.distributions()))
    # What is left of a package whose removal was interrupted has no name.
    distributions = {str(d.metadata["Name"]): d for d in found if d.metadata["Name"]}
    answer = {
        "python": platform.python_version(),
        "prefix": sys.prefix,
        "installed": {name: d.version for name, d in distributions.items()},
        "requires": {name: d.requires or [] for name, d in distributions.items()},
        "cuda": _cuda(),
        "failed": {name.rstrip("?"): error for name in sys.argv[1:] if (error := _import_error(name))},
    }
    with os.fdopen(answer_to, "w") as stream:
        json.dump(answer, stream)


def _cuda() -> str | None:
    """The version of CUDA that PyTorch was built for, also where PyTorch does not import."""
    for folder in sys.path:
        file = Path(folder) / "torch" / "version.py"
        if file.is_file():
            version = runpy.run_path(str(file)).get("cuda")
            return str(version) if version else None
    return None


def _import_error(name: str) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if name.endswith("?") and importlib.util.find_spec(name[:-1]) is None:
                return ""
            importlib.import_module(name.rstrip("?"))
        except BaseException as error:  # a broken package may raise anything, and that is the answer
            return f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return ""


if __name__ == "__main__":
    main()
