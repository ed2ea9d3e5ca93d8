"""Rules about the source tree that no linter checks: sizes of files and functions, and unique class names."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 50

# The stub has the names of the vLLM classes that it replaces, and each template is a project of its own.
EXCLUDED = {"vllm_stub", "starter_templates"}
SOURCES = sorted(path for path in (ROOT / "astuner").rglob("*.py") if EXCLUDED.isdisjoint(path.parts))


def functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function from its `def`, without its docstring."""
    lines = (function.end_lineno or 0) - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is not None:
        lines -= (first.end_lineno or 0) - first.lineno + 1
    return lines


def test_files_and_functions_stay_small():
    too_large = {}
    for path in SOURCES:
        text, name = path.read_text(), str(path.relative_to(ROOT))
        sizes = {f"{name}:{function.name}": body_lines(function) for function in functions(ast.parse(text))}
        too_large |= {function: lines for function, lines in sizes.items() if lines > MAX_FUNCTION_LINES}
        if (lines := len(text.splitlines())) > MAX_FILE_LINES:
            too_large[name] = lines
    assert too_large == {}


def test_public_class_names_are_unique():
    files: dict[str, list[str]] = defaultdict(list)
    for path in SOURCES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files[node.name].append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in files.items() if len(paths) > 1} == {}
