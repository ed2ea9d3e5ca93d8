"""The command-line fixtures of the launcher's tests."""

from tests.launcher.conftest import astuner, folder

__all__ = ["astuner", "folder"]
