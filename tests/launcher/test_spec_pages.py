"""The spec's configurations run as a user would run them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.backbone.spec_pages import PAGES, check_run, write_project


@pytest.mark.parametrize("backbone", ["debug", "local"])
@pytest.mark.parametrize("page", PAGES)
def test_the_configuration_of_a_spec_page_runs(page: str, backbone: str, model_folder: Path, tmp_path: Path) -> None:
    write_project(tmp_path, model_folder)
    viewer = ("--with-logview",) if page == "spec 2" and backbone == "debug" else ()
    check_run(tmp_path, page, f"--backbone={backbone}", *viewer)
