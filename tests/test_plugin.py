"""`package.module->Name` leads to the right class, or to an error that says how to mend it."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from textwrap import dedent

import pytest

from astuner.errors import PluginError
from astuner.plugin import load_class, load_function
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


def test_found_in_a_search_folder_and_the_same_each_time(tmp_path: Path) -> None:
    write(tmp_path, "pack/agent.py", a_workflow("'here'"))
    first = load_class("pack.agent->W", Workflow, search=[tmp_path])
    assert first.tag == "here"  # type: ignore[attr-defined]
    assert load_class("pack.agent->W", Workflow, search=[tmp_path]) is first
    assert load_class("pack/agent.py->W", Workflow, search=[tmp_path]) is first
    assert load_class(f"{tmp_path}/pack/agent.py -> W", Workflow, search=[tmp_path]) is first
    assert sys.modules[first.__module__].__dict__["W"] is first
    assert pickle.loads(pickle.dumps(first)) is first


def test_search_order_and_no_trace_in_sys_path(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        write(tmp_path / folder, "agent_of_two.py", a_workflow(repr(folder)))
    before = list(sys.path)
    one, two = tmp_path / "one", tmp_path / "two"
    assert load_class("agent_of_two->W", Workflow, search=[one, two]).tag == "one"  # type: ignore[attr-defined]
    assert load_class("agent_of_two->W", Workflow, search=[two, one]).tag == "two"  # type: ignore[attr-defined]
    assert sys.path == before
    assert "agent_of_two" not in sys.modules


def test_two_folders_with_equal_names_keep_their_siblings_apart(tmp_path: Path) -> None:
    imports = (
        "import pack.deep\nimport pack.deep as also\nfrom pack.helper import TAG\nfrom .helper import TAG as near\n"
    )
    for folder in ("one", "two"):
        write(tmp_path / folder, "pack/helper.py", f"TAG = {folder!r}\n")
        write(tmp_path / folder, "pack/deep.py", f"TAG = {folder!r} + 'deep'\n")
        write(
            tmp_path / folder,
            "pack/agent.py",
            a_workflow("(TAG, near, pack.deep.TAG, also.TAG)", imports)
            + "\n    def late(self):\n        from pack.later import TAG\n        return TAG\n",
        )
        write(tmp_path / folder, "pack/later.py", f"TAG = {folder!r}\n")
    for folder in ("one", "two"):
        loaded = load_class("pack.agent->W", Workflow, search=[tmp_path / folder])
        assert loaded.tag == (folder, folder, folder + "deep", folder + "deep")  # type: ignore[attr-defined]
    # An import inside a function still knows its folder, long after loading.
    one = load_class("pack.agent->W", Workflow, search=[tmp_path / "one"])
    two = load_class("pack.agent->W", Workflow, search=[tmp_path / "two"])
    assert [one().late(), two().late()] == ["one", "two"]  # type: ignore[attr-defined]


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
    found = load_class("agent->A", object, search=[tmp_path, tmp_path / "top/inner"])
    assert found.v == (5, 5)  # type: ignore[attr-defined]


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
    found = load_class("agent->W", Workflow, search=[tmp_path])
    assert found.tag == ("yaml", "json")  # type: ignore[attr-defined]
    with pytest.raises(PluginError, match=r"does not define execute, which astuner\.workflow\.Workflow leaves"):
        load_class("astuner.workflow->Workflow", Workflow, search=[tmp_path])


def test_a_module_that_is_importable_anyway_is_not_loaded_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "importable_anyway.py", "class A: ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import importable_anyway  # type: ignore[import-not-found]

    assert load_class("importable_anyway->A", object, search=[tmp_path]) is importable_anyway.A


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


def test_installed_modules_and_files_written_a_moment_ago(tmp_path: Path) -> None:
    assert load_class("json.decoder->JSONDecoder", object) is json.JSONDecoder
    assert load_function("json->loads", search=[tmp_path]) is json.loads
    for number in range(3):
        write(tmp_path, f"fresh{number}.py", f"def make():\n    return {number}\n")
        assert load_function(f"fresh{number}->make", search=[tmp_path])() == number
    odd = write(tmp_path / ".hidden", "my-agent.py", "def make():\n    return 'odd'\n")
    assert load_function(f"{odd}->make", search=[tmp_path])() == "odd"


@pytest.mark.parametrize(
    "path", ["", "pack.agent", "pack.agent:W", "->W", "pack.agent->", "pack.agent->a b", "a->b->c"]
)
def test_a_malformed_path_is_told_the_form(path: str) -> None:
    with pytest.raises(PluginError, match=r"is not of the form `package.module->Name`"):
        load_class(path, object)


def test_a_malformed_module_name() -> None:
    with pytest.raises(PluginError, match=r"'\.\.up' is not a module's name"):
        load_class("..up->W", object)


def test_a_missing_module_names_places_and_the_nearest(tmp_path: Path) -> None:
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


def test_a_missing_file_names_places_and_the_nearest(tmp_path: Path) -> None:
    write(tmp_path, "pack/agent.py", "")
    with pytest.raises(PluginError, match=rf"no file {tmp_path}/pack/agnt\.py\. Did you mean agent\.py\?"):
        load_class("pack/agnt.py->W", Workflow, search=[tmp_path])
    with pytest.raises(PluginError, match=r"no file .*/pack/agent\. Did you mean agent\.py\?"):
        load_class("pack/agent->W", Workflow, search=[tmp_path])


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
    assert "_astuner_plugin_" not in str(caught.value)


def test_an_import_error_inside_an_installed_module_is_not_a_missing_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "installed_but_broken.py", "import surely_not_installed\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PluginError, match="importing installed_but_broken raised ModuleNotFoundError"):
        load_class("installed_but_broken->W", object)


def test_a_mended_module_loads_at_the_next_try(tmp_path: Path) -> None:
    write(tmp_path, "mended.py", "raise ValueError('not yet')\n")
    with pytest.raises(PluginError, match="ValueError: not yet"):
        load_class("mended->A", object, search=[tmp_path])
    write(tmp_path, "mended.py", "class A: tag = 'mended by now'\n")
    assert load_class("mended->A", object, search=[tmp_path]).tag == "mended by now"  # type: ignore[attr-defined]


def test_a_wrong_thing_is_described(tmp_path: Path) -> None:
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
    write(tmp_path, "installed/shared_lessons/theirs.py", "WHOSE = 'theirs'\n")
    monkeypatch.syspath_prepend(str(tmp_path / "installed"))
    write(tmp_path, "mine/shared_lessons/mine.py", "WHOSE = 'mine'\n")
    imports = """
        import shared_lessons.theirs
        from shared_lessons import mine
        from shared_lessons.mine import WHOSE
        from shared_lessons.theirs import WHOSE as INSTALLED
    """
    write(tmp_path, "mine/shared_lessons/agent.py", a_workflow("(mine.WHOSE, WHOSE, INSTALLED)", dedent(imports)))
    found = load_class("shared_lessons.agent->W", Workflow, search=[tmp_path / "mine"])
    assert found.tag == ("mine", "mine", "theirs")  # type: ignore[attr-defined]
    # A folder that is on Python's own path has one copy of each module.
    monkeypatch.syspath_prepend(str(tmp_path / "mine"))
    write(tmp_path, "mine/more_lessons/one.py", "class Shared: ...\n")
    write(tmp_path, "mine/more_lessons/agent.py", a_workflow("Shared", "from more_lessons.one import Shared"))
    write(tmp_path, "installed/more_lessons/theirs.py", "")
    tag = load_class("more_lessons.agent->W", Workflow, search=[tmp_path / "mine"]).tag  # type: ignore[attr-defined]
    assert tag.__module__ == "more_lessons.one"
