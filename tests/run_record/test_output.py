"""Redacted output of a worker process."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import sys
from loguru import logger
from astuner.run_record import redact_output, secret_variables
redact_output()
assert secret_variables()["AGENT_API_KEY"] == "not-for-everybody"
assert "HARMLESS" not in secret_variables()
print("out: not-for-everybody")
print("err: not-for-everybody", file=sys.stderr)
logger.info("log: not-for-everybody")
try:
    key = "not-for-everybody"
    raise RuntimeError(key)
except RuntimeError:
    logger.exception("traceback")
"""


def test_a_worker_prints_and_logs_no_secrets():
    environment = os.environ | {"AGENT_API_KEY": "not-for-everybody", "HARMLESS": "for-everybody"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == "out: [redacted]\n"
    for line in ("err: [redacted]", "log: [redacted]", "RuntimeError: [redacted]"):
        assert line in done.stderr
    assert "not-for-everybody" not in done.stderr
