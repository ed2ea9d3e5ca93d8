"""The spec's configurations run on trinity, on the Ray that `--with-ray` starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.backbone.spec_pages import PAGES, check_run, write_project

pytestmark = [pytest.mark.trinity, pytest.mark.slow]


@pytest.mark.parametrize("page", PAGES)
def test_the_configuration_of_a_spec_page_runs(page: str, model_folder: Path, tmp_path: Path) -> None:
    write_project(tmp_path, model_folder)
    output = check_run(tmp_path, page, "--backbone=trinity", "--with-ray")
    assert "service ray: ready after" in output
