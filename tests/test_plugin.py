"""`package.module->Name` resolves to the right class, or to an error that says how to fix it."""

from __future__ import annotations

import json
import pickle
import pkgutil
import subprocess
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from textwrap import dedent

import numpy
import pytest

from astuner.errors import PluginError
from astuner.plugin import imported_packages, load_class, load_function, reject_missing
from astuner.workflow import Workflow


class Animal(ABC):
    @abstractmethod
    def sound(self) -> str: ...


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(dedent(text))
    return file


def a_workflow(tag: str, imports: str = "") -> str:
    return (
        f"{imports}\nfrom astuner.workflow import Workflow\n\n\nclass W(Workflow):\n    tag = {tag}\n\n"
        "    async def execute(self, workflow_task, model_tuner):\n        return None\n"
    )


def test_a_class_in_a_search_folder_is_loaded_once(tmp_path: Path) -> None:
    write(tmp_path, "pack/agent.py", a_workflow("'here'"))
    first = load_class("pack.agent->W", Workflow, search=[tmp_path])
    assert first.tag == "here"  # type: ignore[attr-defined]
    assert load_class("pack.agent->W", Workflow, search=[tmp_path]) is first
    assert load_class("pack/agent.py->W", Workflow, search=[tmp_path]) is first
    assert load_class(f"{tmp_path}/pack/agent.py -> W", Workflow, search=[tmp_path]) is first
    assert sys.modules[first.__module__].__dict__["W"] is first
    assert pickle.loads(pickle.dumps(first)) is first


def test_files_with_one_module_name_are_an_error(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        write(tmp_path / folder, "agent_of_two.py", a_workflow(repr(folder)))
    folder, other_folder = tmp_path / "one", tmp_path / "two"
    with pytest.raises(PluginError, match=rf"ambiguous: {folder}/agent_of_two\.py and {other_folder}/agent_of_two\.py"):
        load_class("agent_of_two->W", Workflow, search=[folder, other_folder])
    assert load_class("agent_of_two->W", Workflow, search=[folder]).tag == "one"  # type: ignore[attr-defined]
    with pytest.raises(
        PluginError, match=rf"imports the module name `agent_of_two` from {folder}/agent_of_two\.py, not"
    ):
        load_class("agent_of_two->W", Workflow, search=[other_folder])
    with pytest.raises(PluginError, match="rename one of them"):
        load_class(f"{other_folder}/agent_of_two.py->W", Workflow, search=[folder])


def test_a_folder_with_the_name_of_an_installed_package_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, "yaml/agent.py", a_workflow("''"))
    message = rf"imports the module name `yaml` from .*/yaml/__init__\.py, not from {tmp_path}"
    with pytest.raises(PluginError, match=message):
        load_class("yaml.agent->W", Workflow, search=[tmp_path])


def test_a_search_folder_comes_before_the_folders_of_pythonpath(tmp_path: Path) -> None:
    write(tmp_path / "elsewhere", "beside.py", "HERE = 'elsewhere'")
    write(tmp_path / "project", "beside.py", "HERE = 'project'")
    write(tmp_path / "project", "agent_of_project.py", "import beside\n" + a_workflow("beside.HERE"))
    sys.path.insert(1, str(tmp_path / "elsewhere"))
    for _ in range(2):
        loaded = load_class("agent_of_project:W", Workflow, search=[tmp_path / "project"])
        assert loaded.tag == "project"  # type: ignore[attr-defined]
    assert sys.path.count(str(tmp_path / "project")) == 1


@pytest.mark.parametrize("name", ["random.py", "email/__init__.py"])
def test_modules_of_the_standard_library_keep_their_names(tmp_path: Path, name: str) -> None:
    write(tmp_path, name, "")
    write(tmp_path, "agent.py", a_workflow("''"))
    load_class("agent->W", Workflow, search=[tmp_path])
    load_class("agent->W", Workflow, search=[tmp_path])
    assert sys.path.count(str(tmp_path)) == 1
    place = sys.path.index(str(tmp_path))
    assert place > max(index for index, entry in enumerate(sys.path) if entry.endswith("lib-dynload"))
    assert place < min(index for index, entry in enumerate(sys.path) if entry.endswith("site-packages"))


def test_a_search_folder_that_an_editable_install_appended_comes_before_installed_packages(tmp_path: Path) -> None:
    packages = tmp_path / "site-packages"
    write(packages, "installed/__init__.py", "")
    folder = tmp_path / "project"
    write(folder, "installed/__init__.py", "")
    write(folder, "installed/agent.py", a_workflow("'here'"))
    sys.path += [str(packages), str(folder)]
    assert load_class("installed/agent.py->W", Workflow, search=[folder]).tag == "here"  # type: ignore[attr-defined]


def test_a_sibling_is_one_module_however_it_is_reached(tmp_path: Path) -> None:
    write(tmp_path, "pack/shared.py", "class Shared: ...\n")
    write(tmp_path, "pack/a.py", "import pack.shared\nfrom pack.shared import Shared\n")
    from_a = load_class("pack.a->Shared", object, search=[tmp_path])
    assert load_class("pack.shared->Shared", object, search=[tmp_path]) is from_a


def test_imports_reach_the_other_search_folder(tmp_path: Path) -> None:
    write(tmp_path, "top/inner/tool.py", "VALUE = 5\n")
    write(
        tmp_path,
        "top/inner/agent.py",
        "from top.inner.tool import VALUE\nfrom tool import VALUE as same\n\n\nclass A: v = (VALUE, same)\n",
    )
    loaded = load_class("agent->A", object, search=[tmp_path, tmp_path / "top/inner"])
    assert loaded.v == (5, 5)  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", ["named_twice.named_twice->W", "named_twice/named_twice.py->W"])
def test_a_module_with_the_name_of_its_folder_is_found_from_above(tmp_path: Path, path: str) -> None:
    write(tmp_path, "named_twice/helper.py", "TAG = 'here'\n")
    write(tmp_path, "named_twice/named_twice.py", a_workflow("TAG", "from named_twice.helper import TAG"))
    loaded = load_class(path, Workflow, search=[tmp_path, tmp_path / "named_twice"])
    assert loaded.tag == "here"  # type: ignore[attr-defined]
    assert loaded.__module__ == "named_twice.named_twice"
    assert pickle.loads(pickle.dumps(loaded)) is loaded


def test_a_folder_with_the_name_of_a_file_in_the_repository_is_found(tmp_path: Path) -> None:
    # An editable install adds the root of the repository to `sys.path`.
    root = Path(__file__).parents[1]
    assert (root / "launcher.py").is_file()
    write(tmp_path, "launcher/agent.py", a_workflow("'here'"))
    code = f"""
import sys
from pathlib import Path
sys.path.append({str(root)!r})
from astuner import Workflow
from astuner.plugin import load_class
print(load_class("launcher.agent->W", Workflow, search=[Path({str(tmp_path)!r})]).tag)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("here\n", 0), done.stderr


def test_packages_with_init_dataclasses_and_future_annotations(tmp_path: Path) -> None:
    write(tmp_path, "real/__init__.py", "from real.config import Config\n")
    write(
        tmp_path,
        "real/config.py",
        """\
        from __future__ import annotations
        from dataclasses import dataclass
        from typing import ClassVar, get_type_hints

        @dataclass
        class Config:
            kind: ClassVar[str] = "k"
            size: int = 3

        HINTS = get_type_hints(Config)
        """,
    )
    config = load_class("real->Config", object, search=[tmp_path])
    assert config is load_class("real.config->Config", object, search=[tmp_path])
    assert pickle.loads(pickle.dumps(config())) == config()


def test_a_data_folder_or_a_clone_does_not_hide_what_is_installed(tmp_path: Path) -> None:
    (tmp_path / "yaml").mkdir()  # a mere folder, like one of data
    write(tmp_path, "astuner/__init__.py", "raise RuntimeError('a clone that is not the running package')\n")
    write(tmp_path, "json.py", "raise RuntimeError('hides the standard library')\n")
    write(tmp_path, "agent.py", a_workflow("(yaml.__name__, json.__name__)", "import yaml, json"))
    loaded = load_class("agent->W", Workflow, search=[tmp_path])
    assert loaded.tag == ("yaml", "json")  # type: ignore[attr-defined]
    with pytest.raises(PluginError, match=r"does not define execute, which subclasses of astuner\.workflow\.Work"):
        load_class("astuner.workflow->Workflow", Workflow, search=[tmp_path])


def test_a_module_on_sys_path_is_not_loaded_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "on_sys_path.py", "class A: ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import on_sys_path  # type: ignore[import-not-found]

    assert load_class("on_sys_path->A", object, search=[tmp_path]) is on_sys_path.A


def test_a_script_that_names_its_own_class_does_not_run_twice(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "script.py",
        """\
        from pathlib import Path
        from astuner.plugin import load_class
        print("runs")
        class A: ...
        print(load_class("script->A", object, search=[Path(__file__).parent]) is A)
        """,
    )
    done = subprocess.run([sys.executable, "-P", str(script)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["runs", "True"]


def test_installed_modules_and_new_files(tmp_path: Path) -> None:
    assert load_class("json.decoder->JSONDecoder", object) is json.JSONDecoder
    assert load_function("json->loads", search=[tmp_path]) is json.loads
    for number in range(3):
        write(tmp_path, f"fresh{number}.py", f"def make():\n    return {number}\n")
        assert load_function(f"fresh{number}->make", search=[tmp_path])() == number
    odd = write(tmp_path / ".hidden", "my-agent.py", "def make():\n    return 'odd'\n")
    assert load_function(f"{odd}->make", search=[tmp_path])() == "odd"


@pytest.mark.parametrize(
    "path", ["", "pack.agent", "agent:", ":W", "m-", "->W", "pack.agent->", "pack.agent->a b", "a->b->c"]
)
def test_a_malformed_path_names_the_form(path: str) -> None:
    with pytest.raises(PluginError, match=r"is not of the form `package.module->Name`"):
        load_class(path, object)


def test_a_bare_word_shows_a_path_of_a_class_and_its_file() -> None:
    with pytest.raises(PluginError, match=r"for example `agent->Agent` for class Agent in agent\.py"):
        load_class("environment", object)


def test_a_malformed_module_name() -> None:
    with pytest.raises(PluginError, match=r"'\.\.up' is not a module name"):
        load_class("..up->W", object)


def test_a_missing_module_names_folders_and_the_nearest(tmp_path: Path) -> None:
    write(tmp_path, "tutorial/example_math/math_agent.py", "")
    with pytest.raises(PluginError) as caught:
        load_class("tutorial.exmple_math.math_agnt->W", Workflow, search=[tmp_path])
    text = str(caught.value)
    assert f"no tutorial/exmple_math/math_agnt.py in {tmp_path}" in text
    assert "no installed module tutorial.exmple_math.math_agnt" in text
    assert "Did you mean `tutorial.example_math.math_agent`?" in text
    with pytest.raises(PluginError, match=r"Did you mean `astuner\.workflow`\?"):
        load_class("astunner.workflow->Workflow", Workflow)
    with pytest.raises(PluginError, match=r"Did you mean `json\.decoder`\?"):
        load_class("json.decodr->JSONDecoder", object)


def test_a_module_of_a_folder_above_says_where_to_run_the_command(tmp_path: Path) -> None:
    write(tmp_path, "tutorial/example_math/math_agent.py", "class W: ...\n")
    search = [tmp_path / "tutorial/example_math", tmp_path / "elsewhere"]
    with pytest.raises(PluginError, match=rf"Run the command in {tmp_path}, which has it\.$"):
        load_class("tutorial.example_math.math_agent->W", object, search=search)


def test_a_missing_file_names_folders_and_the_nearest(tmp_path: Path) -> None:
    write(tmp_path, "pack/agent.py", "")
    with pytest.raises(PluginError, match=rf"no file {tmp_path}/pack/agnt\.py\. Did you mean agent\.py\?"):
        load_class("pack/agnt.py->W", Workflow, search=[tmp_path])
    with pytest.raises(PluginError, match=r"no file .*/pack/agent\. Did you mean agent\.py\?"):
        load_class("pack/agent->W", Workflow, search=[tmp_path])


@pytest.mark.parametrize(
    "module", ["math_agent.math_agent", "math_agent.nothing_like_it", "math_agent/nothing_like_it.py"]
)
def test_a_missing_module_names_the_one_that_defines_the_class(tmp_path: Path, module: str) -> None:
    write(tmp_path, "math_agent/workflow.py", "class MathAgentWorkflow: ...\n")
    write(tmp_path, "math_agent/early.py", "class MathAgentWorkflowOfOld: ...  # MathAgentWorkflow\n")
    write(tmp_path, "top.py", "class MathAgentWorkflow: ...\n")
    with pytest.raises(PluginError, match=r"Did you mean `math_agent\.workflow->MathAgentWorkflow`\?"):
        load_class(f"{module}->MathAgentWorkflow", object, search=[tmp_path])
    with pytest.raises(PluginError, match=r"Did you mean `workflow->MathAgentWorkflow`\?"):
        load_class(f"{module}->MathAgentWorkflow", object, search=[tmp_path / "math_agent"])


def test_of_modules_that_define_the_class_the_most_similar_is_named(tmp_path: Path) -> None:
    for name in ("an_old_one", "agents", "unrelated"):
        write(tmp_path, f"{name}.py", "class W: ...\n")
    with pytest.raises(PluginError, match=r"Did you mean `agents->W`\?"):
        load_class("agnets->W", object, search=[tmp_path])


def test_a_module_that_raises_is_located(tmp_path: Path) -> None:
    file = write(tmp_path, "pack/boom.py", "import json\n\n\njson.loads('{')\n")
    with pytest.raises(PluginError) as caught:
        load_class("pack.boom->W", Workflow, search=[tmp_path])
    assert f"importing {file} raised JSONDecodeError: Expecting property name" in str(caught.value)
    assert f"(at {file}:4)" in str(caught.value)
    assert isinstance(caught.value.__cause__, json.JSONDecodeError)


@pytest.mark.parametrize(
    ("text", "reason", "line"),
    [
        ("x = 1\nimport pack.missing_one\n", "ModuleNotFoundError: No module named 'missing_one_too'", None),
        ("import surely_not_installed\n", "ModuleNotFoundError: No module named 'surely_not_installed'", 1),
        ("from pack.present import nothing\n", "ImportError: cannot import name 'nothing' from 'pack.present'", 1),
        ("x = 1\nx = (\n", "SyntaxError: '(' was never closed", 2),
        ("\nimport sys\nsys.exit(3)\n", "SystemExit: 3", 3),
    ],
)
def test_other_ways_of_failing_to_import(tmp_path: Path, text: str, reason: str, line: int | None) -> None:
    write(tmp_path, "pack/present.py", "")
    helper = write(tmp_path, "pack/missing_one.py", "import missing_one_too\n")
    file = write(tmp_path, "pack/agent.py", text)
    with pytest.raises(PluginError) as caught:
        load_class("pack.agent->W", Workflow, search=[tmp_path])
    assert reason in str(caught.value)
    assert str(caught.value).endswith(f"(at {file}:{line}).") if line else f"(at {helper}:1)" in str(caught.value)


def test_an_import_error_inside_an_installed_module_is_not_a_missing_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "installed_but_broken.py", "import surely_not_installed\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PluginError, match="importing installed_but_broken raised ModuleNotFoundError"):
        load_class("installed_but_broken->W", object)


def test_a_fixed_module_loads_at_the_next_try(tmp_path: Path) -> None:
    write(tmp_path, "fixed.py", "raise ValueError('not yet')\n")
    with pytest.raises(PluginError, match="ValueError: not yet"):
        load_class("fixed->A", object, search=[tmp_path])
    write(tmp_path, "fixed.py", "class A: tag = 'fixed'\n")
    assert load_class("fixed->A", object, search=[tmp_path]).tag == "fixed"  # type: ignore[attr-defined]


def test_a_wrong_object_is_described(tmp_path: Path) -> None:
    write(
        tmp_path,
        "things.py",
        """\
        from THIS_TEST import Animal
        class MathWorkflow: ...
        class Mute(Animal): ...
        class Dog(Animal):
            def sound(self): return "wuff"
        def function(): ...
        number = 7
        """.replace("THIS_TEST", __name__),
    )

    def message(path: str, base: type = Animal) -> str:
        with pytest.raises(PluginError) as caught:
            load_class(path, base, search=[tmp_path])
        return str(caught.value)

    assert "has no MathWorkflo. Did you mean MathWorkflow?" in message("things->MathWorkflo")
    assert "It defines Dog, MathWorkflow, Mute, function." in message("things->Zzz")
    assert "`things->number` is 7, of type int; expected a class" in message("things->number")
    assert "`things->function` is <function function" in message("things->function")
    assert "derives from builtins.object; expected one that derives from" in message("things->MathWorkflow")
    assert "Write `class MathWorkflow(Animal):`" in message("things->MathWorkflow")
    assert "`things->Mute` does not define sound" in message("things->Mute")
    assert load_class("things->Dog", Animal, search=[tmp_path])().sound() == "wuff"
    with pytest.raises(PluginError, match=r"`things->number` is 7, of type int; expected a function"):
        load_function("things->number", search=[tmp_path])


def test_a_folder_shares_its_name_with_an_installed_one_without_init(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As TransferQueue, which verl needs, installs a folder named tutorial.
    write(tmp_path, "installed/shared_lessons/installed_file.py", "WHOSE = 'installed_file'\n")
    monkeypatch.syspath_prepend(str(tmp_path / "installed"))
    write(tmp_path, "user/shared_lessons/user.py", "WHOSE = 'user'\n")
    imports = """
        import shared_lessons.installed_file
        from shared_lessons import user
        from shared_lessons.user import WHOSE
        from shared_lessons.installed_file import WHOSE as INSTALLED
    """
    write(tmp_path, "user/shared_lessons/agent.py", a_workflow("(user.WHOSE, WHOSE, INSTALLED)", dedent(imports)))
    loaded = load_class("shared_lessons.agent->W", Workflow, search=[tmp_path / "user"])
    assert loaded.tag == ("user", "user", "installed_file")  # type: ignore[attr-defined]
    # A folder on `sys.path` has one copy of each module.
    monkeypatch.syspath_prepend(str(tmp_path / "user"))
    write(tmp_path, "user/more_lessons/one.py", "class Shared: ...\n")
    write(tmp_path, "user/more_lessons/agent.py", a_workflow("Shared", "from more_lessons.one import Shared"))
    write(tmp_path, "installed/more_lessons/installed_file.py", "")
    tag = load_class("more_lessons.agent->W", Workflow, search=[tmp_path / "user"]).tag  # type: ignore[attr-defined]
    assert tag.__module__ == "more_lessons.one"


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("agent_of_check->Wrong", "has no Wrong"),
        ("agent_of_check.py->Wrong", "has no Wrong"),
        ("no_agent->W", "no installed module no_agent"),
        ("no_agent.py->W", "no file"),
        ("agent_of_check.W", "is not of the form"),
        ("", "is not of the form"),
    ],
)
def test_missing_names_are_rejected(tmp_path: Path, path: str, named: str) -> None:
    write(tmp_path, "agent_of_check.py", a_workflow("1"))
    with pytest.raises(PluginError, match=named):
        reject_missing(path, search=[tmp_path])


@pytest.mark.parametrize("path", ["fails->W", "fails.py->W", "stars->W", "json->W"])
def test_names_that_may_exist_are_not_imported(tmp_path: Path, path: str) -> None:
    write(tmp_path, "fails.py", "raise ValueError\nclass W: ...\n")
    write(tmp_path, "stars.py", "raise ValueError\nfrom fails import *\n")
    reject_missing(path, search=[tmp_path])


def test_what_a_file_imports_from_installed_packages(tmp_path: Path) -> None:
    write(
        tmp_path,
        "agent.py",
        """
        import json
        import yaml
        from numpy import *
        from numpy.random import default_rng, seed as set_seed
        from astuner import Workflow
        from helper import first
        from . import second

        def later():
            import torch
        """,
    )
    names = ["yaml", "numpy", "numpy.random:default_rng", "numpy.random:seed", "astuner:Workflow"]
    assert imported_packages("agent.py->W", [tmp_path]) == names
    assert [pkgutil.resolve_name(name) for name in names[3:]] == [numpy.random.seed, Workflow]
