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
from email import message_from_string
from email.message import Message
from pathlib import Path


def main() -> None:
    """Write the result to standard output; discard everything that imported modules print."""
    stdout = os.dup(1)
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.dup2(devnull, 2)
    # The first distribution of a name counts, as for imports. One whose removal was interrupted has no name.
    found = [(_metadata(each), each) for each in reversed(list(importlib.metadata.distributions()))]
    packages = {str(metadata["Name"]): (metadata, each) for metadata, each in found if metadata["Name"]}
    torch = next((file for path in sys.path if (file := Path(path, "torch", "version.py")).is_file()), None)
    result = {
        "python": platform.python_version(),
        "prefix": sys.prefix,
        "installed": {name: metadata["Version"] for name, (metadata, _) in packages.items()},
        "requires": {name: _requires(metadata, each) for name, (metadata, each) in packages.items()},
        # Read from the file, because a broken PyTorch does not import.
        "cuda": torch and (runpy.run_path(str(torch)).get("cuda") or None),
        "import_errors": {name.rstrip("?"): error for name in sys.argv[1:] if (error := _import_error(name))},
    }
    with os.fdopen(stdout, "w") as stream:
        json.dump(result, stream)


def _metadata(package: importlib.metadata.Distribution) -> Message:
    """Return a package's metadata without the description; `package.metadata` reads all of it at each access."""
    text = package.read_text("METADATA") or package.read_text("PKG-INFO") or package.read_text("") or ""
    return message_from_string(text.partition("\n\n")[0])


def _requires(metadata: Message, package: importlib.metadata.Distribution) -> list[str]:
    declared = metadata.get_all("Requires-Dist") or []
    return declared or (package.requires or [] if package.read_text("requires.txt") else [])  # of an egg


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
