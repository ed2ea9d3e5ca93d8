"""AppWorld (https://appworld.dev), whose server runs in its own environment because it needs pydantic 1."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from astuner.env_service.environment import Environment
from astuner.errors import EnvError, short_repr, shorten
from astuner.schema import Action, Evaluation, Observation, StepResult, TaskProfile
from astuner.system.child_process import wait_or_kill
from astuner.system.localhost import ADDRESS, free_port
from astuner.system.paths import installed_program

_SPLITS = ("train", "dev", "test_normal", "test_challenge")
_START_SECONDS = 120.0
_END_SECONDS = 10.0
_INSTRUCTION = """\
You are an assistant of {name}, and act for them by writing Python code. Your email account, phone and other apps are \
those of your supervisor {name} ({email}, {phone}). The current time is {datetime}.

The variable `apis` calls the apps: `apis.APP.API(...)`. To learn about them, call
- `print(apis.api_docs.show_app_descriptions())`
- `print(apis.api_docs.show_api_descriptions(app_name='spotify'))`
- `print(apis.api_docs.show_api_doc(app_name='spotify', api_name='login'))`
Each answer contains one code block. The next message shows what it printed. Variables keep their values. When the \
task is done, call `apis.supervisor.complete_task()`, with `answer=...` if the task is a question.

Task: {instruction}"""


def names() -> Sequence[str]:
    """Return the only name; its tasks have to be downloaded with `appworld download data`."""
    return ("appworld",)


def create(name: str, /, **params: Any) -> Environment:
    """Return the environment."""
    if name != "appworld":
        raise EnvError(f"there is no environment appworld/{name}; write appworld/appworld")
    return AppWorldEnvironment(**params)


class AppWorldEnvironment(Environment):
    """Tasks of AppWorld. An action is Python code, which AppWorld's server runs. Each instance has its own server.

    The score is the share of the task's tests that pass; the task is solved if all pass.

    Args:
        root: the folder in which `appworld download data` was called; `APPWORLD_ROOT` or `.` by default.
        command: the program `appworld`; by default that of `astuner install appworld`, or else that on the PATH.
        max_interactions: the number of actions that AppWorld executes.
        timeout_seconds: time limit of an action, in seconds.

    Raises:
        EnvError: the folder has no tasks, or there is no such program.
    """

    def __init__(
        self,
        root: str | None = None,
        command: str | Sequence[str] | None = None,
        max_interactions: int = 1000,
        timeout_seconds: int = 100,
    ) -> None:
        self._root = Path(root or os.environ.get("APPWORLD_ROOT") or ".").expanduser().resolve()
        command = command or installed_program("appworld", "appworld") or "appworld"
        self._command = shlex.split(command) if isinstance(command, str) else list(map(str, command))
        if shutil.which(self._command[0]) is None:
            raise EnvError(
                f"there is no program {short_repr(self._command[0])}. Install AppWorld in its own virtual environment "
                "with `astuner install appworld`, or set `command` to its program `appworld`"
            )
        if not (self._root / "data/datasets").is_dir():
            raise EnvError(
                f"{self._root} has no AppWorld tasks (no folder data/datasets). Download them with "
                f"`{self._command[0]} download data --root {self._root}`, or set `root`"
            )
        self._options = {"max_interactions": max_interactions, "timeout_seconds": timeout_seconds}
        self._timeout = timeout_seconds + 60.0
        self._task_id = ""
        self._server: subprocess.Popen[bytes] | None = None
        self._http: httpx.Client | None = None
        self._log: Any = None

    def splits(self) -> Sequence[str]:
        """Return the data sets of AppWorld that have been downloaded."""
        return [split for split in _SPLITS if self._dataset(split).is_file()]

    def task_ids(self, split: str) -> Sequence[str]:
        """Return the ids of a data set."""
        lines = [line.strip() for line in self._dataset(split).read_text().splitlines()]
        return [line.partition(":")[0] for line in lines if line]  # what follows the colon is a tag

    def profile(self, split: str, task_id: str) -> TaskProfile:
        """Return the instruction of a task."""
        specs = json.loads((self._root / "data/tasks" / task_id / "specs.json").read_text())
        supervisor = specs["supervisor"]
        instruction = _INSTRUCTION.format(
            name=f"{supervisor['first_name']} {supervisor['last_name']}",
            email=supervisor["email"],
            phone=supervisor["phone_number"],
            datetime=specs["datetime"],
            instruction=specs["instruction"],
        )
        return TaskProfile(
            task_id,
            instruction,
            metadata={"instruction": specs["instruction"]},
            max_steps=self._options["max_interactions"],
        )

    def reset(self, split: str, task_id: str, seed: int) -> Observation:
        """Start a server, and load the task."""
        self.close()
        self._start()
        self._task_id = task_id
        self._post("initialize", experiment_name=f"astuner-{os.getpid()}", random_seed=seed % 2**31, **self._options)
        return Observation("")

    def step(self, action: Action) -> StepResult:
        """Run code, and return its output."""
        if not isinstance(action, str):
            return StepResult(Observation("Invalid action: expected Python code."), is_valid=False)
        output = str(self._post("execute", code=action))
        is_done = bool(self._post("task_completed"))
        return StepResult(Observation(output), is_done=is_done)

    def evaluate(self) -> Evaluation:
        """Return the share of the task's tests that pass."""
        result = self._post("evaluate", suppress_errors=True)
        passed, failed = len(result["passes"]), len(result["failures"])
        return Evaluation(passed / max(passed + failed, 1), bool(result["success"]), details=result)

    def close(self) -> None:
        """End the server, and remove its files."""
        if self._http is not None:
            self._http.close()
            self._http = None
        if self._server is not None:
            self._server.terminate()
            wait_or_kill(self._server, _END_SECONDS)
            self._server = None
            self._log.close()
            shutil.rmtree(self._root / f"experiments/outputs/astuner-{os.getpid()}", ignore_errors=True)

    def _dataset(self, split: str) -> Path:
        return self._root / f"data/datasets/{split}.txt"

    def _start(self) -> None:
        port = free_port()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._server = subprocess.Popen(
            [*self._command, "serve", "environment", "--port", str(port), "--root", str(self._root), "--no-show-usage"],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        self._http = httpx.Client(base_url=f"http://{ADDRESS}:{port}", timeout=self._timeout, trust_env=False)
        limit = time.monotonic() + _START_SECONDS
        while True:
            try:
                self._http.get("/")
                return
            except httpx.TransportError:
                if self._server.poll() is None and time.monotonic() < limit:
                    time.sleep(0.05)
                    continue
            ended = self._server.poll()
            what = f"did not answer within {_START_SECONDS:g} s" if ended is None else f"ended with code {ended}"
            self._log.seek(0)
            text = self._log.read().decode(errors="replace").strip()
            self.close()
            raise EnvError(f"AppWorld's server {what}: {shorten(text[-1000:])}")

    def _post(self, path: str, **fields: Any) -> Any:
        if self._http is None:
            raise EnvError("the instance has no server: it was not reset, or is closed")
        try:
            response = self._http.post(f"/{path}", json={"task_id": self._task_id, **fields})
        except httpx.HTTPError as error:
            raise EnvError(f"AppWorld's server did not answer /{path}: {error}") from error
        if response.is_error:
            raise EnvError(f"AppWorld's server answered /{path} with {response.status_code}: {shorten(response.text)}")
        return response.json()["output"]
