"""A program with the command line and the HTTP interface of `appworld serve environment`, whose data need a download.

It executes code as AppWorld does. Its one app is a note book.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import uvicorn
from fastapi import Body, FastAPI

app = FastAPI()
arguments = dict(zip(sys.argv[3::2], sys.argv[4::2], strict=False))
world: dict[str, Any] = {}


@app.get("/")
def index() -> dict[str, str]:
    return {"message": "Welcome"}


@app.post("/initialize")
def initialize(args: dict[str, Any] = Body(...)) -> dict[str, Any]:  # noqa: B008
    specs = json.loads((Path(arguments["--root"]) / f"data/tasks/{args['task_id']}/specs.json").read_text())
    notes: list[str] = []

    def complete_task(answer: Any = None) -> None:
        world["completed"] = True

    apis = SimpleNamespace(
        notes=SimpleNamespace(add=notes.append), supervisor=SimpleNamespace(complete_task=complete_task)
    )
    world.update(
        task_id=args["task_id"], expected=specs["expected"], notes=notes, completed=False, names={"apis": apis}
    )
    return {"output": {"task_id": args["task_id"], "instruction": specs["instruction"]}}


@app.post("/execute")
def execute(task_id: str = Body(...), code: str = Body(...)) -> dict[str, Any]:
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            exec(code, world["names"])
    except Exception:
        return {"output": f"Execution failed. Traceback:\n{traceback.format_exc()}"}
    return {"output": out.getvalue() or "Execution successful."}


@app.post("/task_completed")
def task_completed(task_id: str = Body(..., embed=True)) -> dict[str, Any]:
    return {"output": world["completed"]}


@app.post("/evaluate")
def evaluate(task_id: str = Body(...), suppress_errors: bool = Body(False), report: bool = Body(False)) -> Any:
    tests = {f"note {note}": note in world["notes"] for note in world["expected"]}
    passes = [{"requirement": name, "label": None} for name, passed in tests.items() if passed]
    failures = [{"requirement": name, "label": None, "trace": ""} for name, passed in tests.items() if not passed]
    result = {"success": not failures, "difficulty": 1, "num_tests": len(tests), "passes": passes, "failures": failures}
    return {"output": result}


if __name__ == "__main__":
    assert sys.argv[1:3] == ["serve", "environment"]
    if (Path(arguments["--root"]) / "broken").exists():
        sys.exit("The data does not exist.")
    uvicorn.run(app, host="127.0.0.1", port=int(arguments["--port"]), log_level="warning")
