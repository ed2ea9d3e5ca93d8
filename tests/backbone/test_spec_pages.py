"""The spec's configurations run as a user would run them, on every backbone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.backbone.spec_pages import check_run, write_project


@pytest.mark.parametrize(
    ("page", "backbone"),
    [
        ("spec 2", "debug"),
        ("spec 2", "local"),
        pytest.param("spec 2", "trinity", marks=[pytest.mark.trinity, pytest.mark.slow]),
        ("spec 3", "debug"),
        ("spec 3", "local"),
        # In each build, verl/test_composition.py checks that verl takes the configuration.
        pytest.param("spec 2", "verl", marks=[pytest.mark.verl, pytest.mark.slow, pytest.mark.long]),
        pytest.param("spec 3", "verl", marks=[pytest.mark.verl, pytest.mark.slow]),
        pytest.param("spec 3", "trinity", marks=[pytest.mark.trinity, pytest.mark.slow]),
    ],
)
def test_the_configuration_of_a_spec_page_runs(page: str, backbone: str, model_folder: Path, tmp_path: Path) -> None:
    write_project(tmp_path, model_folder)
    with_ray = ("--with-ray",) if backbone in ("verl", "trinity") else ()
    output = check_run(tmp_path, page, f"--backbone={backbone}", *with_ray)
    assert ("service ray: ready after" in output) == bool(with_ray)
