"""`astuner runs` and `astuner completion`: the records of runs, listed, compared, annotated, deleted and completed."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from astuner.cli.main import astuner as command
from astuner.cli.main import main
from astuner.run_record.folder import FolderLock
from astuner.run_record.record import RunRecord
from astuner.run_record.recorded_run import RecordedRun
from astuner.run_record.summary import EpisodesSummary, RunSummary, ValidationsSummary, ValidationSummary

CONFIG = """
astuner:
  experiment_name: {name}
  backbone: local
  model: {{path: a/model}}
  trainer_common:
    algorithm: {{adv_estimator: grpo}}
    optim: {{lr: {lr}}}
"""


def write_run(name: str, after: float, *, lr: float = 1e-6, failed: int = 0, ended: bool = True) -> Path:
    folder = Path("launcher_record") / name
    config = CONFIG.format(name=name, lr=lr)
    with RunRecord.open(folder, backbone="local", config_yaml=config, resume=False, loggers=()) as record:
        record.log_metrics(1, {"reward/mean": after / 2})
        record.log_metrics(2, {"reward/mean": after})
        if ended:
            rates = [ValidationSummary(success_rate=rate, reward=rate, episodes=200) for rate in (0.25, after)]
            ok = 0 if failed else 8
            summary = RunSummary(backbone="local", seed=1, steps=2, seconds=75.0)
            record.write_summary(
                summary.model_copy(
                    update={
                        "validation": ValidationsSummary(before=rates[0], after=rates[1]),
                        "episodes": EpisodesSummary(ok=ok, failed=failed, dropped=0),
                    }
                )
            )
    return folder


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    for seconds, folder in enumerate(
        (
            write_run("slow", 0.5),
            write_run("fast", 0.9, lr=3e-6),
            write_run("killed", 0.1, ended=False),
            write_run("slow-debug", 0.0, failed=4),
            write_run("slow.1", 0.4),
        )
    ):
        os.utime(folder / "environment.json", (1e9 + seconds, 1e9 + seconds))


def run(*words: str, answer: str | None = None) -> Result:
    return CliRunner().invoke(command, ["runs", *words], input=answer)


def listed(*words: str) -> list[str]:
    result = run("--json", *words)
    assert result.exit_code == 0, result.output
    return [json.loads(line)["run"] for line in result.output.splitlines()]


@pytest.mark.usefixtures("records")
class TestRuns:
    def test_the_list_hides_debug_runs_and_earlier_copies(self) -> None:
        assert listed() == ["killed", "fast", "slow"]
        assert listed("--all") == ["slow.1", "slow-debug", "killed", "fast", "slow"]
        text = run().output
        assert "25% → 90%" in text
        assert "1:15" in text
        assert [line.split()[2] for line in text.splitlines() if line.startswith(("slow", "fast"))] == ["learned"] * 2
        assert "2 debug runs, dry runs and renamed earlier runs are hidden" in text

    def test_filter_and_order(self) -> None:
        assert listed("--sort", "reward") == ["fast", "slow", "killed"]
        assert listed("--sort=success") == ["fast", "slow", "killed"]
        assert listed("--sort=run") == ["fast", "killed", "slow"]
        assert listed("--filter", "stopped") == ["killed"]
        assert listed("--filter=finished", "--filter=a/model", "--filter=FAST") == ["fast"]
        assert listed("--filter=learned") == ["fast", "slow"]
        assert listed("--filter=missing") == []

    def test_a_run_whose_episodes_all_failed_has_failed(self) -> None:
        rows = {row["run"]: row for row in map(json.loads, run("--json", "--all").output.splitlines())}
        assert {name: row["state"] for name, row in rows.items()} == {
            "slow": "finished", "fast": "finished", "killed": "stopped", "slow-debug": "failed", "slow.1": "finished",
        }  # fmt: skip
        assert {name: row["outcome"] for name, row in rows.items()} == {
            "slow": "learned", "fast": "learned", "killed": None, "slow-debug": None, "slow.1": "learned",
        }  # fmt: skip
        assert rows["slow-debug"]["failed_episodes"] == 4
        assert (rows["fast"]["success_before"], rows["fast"]["success"], rows["fast"]["steps"]) == (0.25, 0.9, 2)

    def test_a_comparison_names_results_keys_and_what_is_noise(self) -> None:
        text = run("compare", "slow", "fast").output
        assert "optim.lr" in text
        assert "experiment_name" not in text
        assert "fast and slow differ beyond noise: +40.0 points" in text
        assert "slow.1 and slow differ beyond noise" in run("compare", "slow", "slow.1").output
        assert "slow and slow do not differ beyond noise" in run("compare", "slow", "slow").output
        assert "no success rates to compare" in run("compare", "slow", "killed").output
        assert run("compare", "slow").exit_code == 2

    def test_notes_and_tags(self) -> None:
        assert run("note", "fast").output == "fast has no note\n"
        assert run("note", "fast", "higher rate", "--tag=best", "--tag=lr").output == "higher rate #best #lr\n"
        assert run("note", "fast").output == "higher rate #best #lr\n"
        run("note", "fast", "the best rate")
        note = RecordedRun(Path("launcher_record/fast")).note
        assert (note.text, note.tags) == ("the best rate", ("best", "lr"))
        assert listed("--filter=best") == ["fast"]
        run("note", "fast", "--clear")
        assert run("note", "fast").output == "fast has no note\n"

    def test_deletion_asks_first_and_spares_live_runs(self) -> None:
        refused = run("delete", "fast", answer="n\n")
        assert refused.exit_code == 1
        assert Path("launcher_record/fast").exists()
        lock = FolderLock(Path("launcher_record/slow"))
        live = run("delete", "slow", "--yes")
        lock.release()
        assert "is being written by a live run" in str(live.exception)
        assert Path("launcher_record/slow").exists()
        assert "deleted" in run("delete", "fast", "slow.1", answer="y\n").output
        assert listed("--all") == ["slow-debug", "killed", "slow"]
        assert "did you mean 'slow'" in str(run("delete", "slw", "--yes").exception)

    def test_the_shell_completes_runs(self) -> None:
        assert completed("astuner", "runs", "delete", "sl") == ["slow", "slow-debug", "slow.1"]
        assert completed("astuner", "explain", "fa") == ["fast"]
        assert completed("astuner", "runs", "no") == ["note"]


def test_a_folder_without_runs_is_an_error(tmp_path: Path) -> None:
    assert "there are no runs in" in str(run("--exp-dir", str(tmp_path)).exception)


def test_an_option_before_the_command_is_not_ignored() -> None:
    result = run("--exp-dir=x", "compare", "a", "b")
    assert result.exit_code == 2
    assert "--exp-dir must follow the command: astuner runs compare --exp-dir" in result.output


def completed(*words: str) -> list[str]:
    environment = {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    from click.shell_completion import get_completion_class

    kind = get_completion_class("bash")
    assert kind is not None
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        found = kind(command, {}, "astuner", "_ASTUNER_COMPLETE").complete()
    return sorted(line.split(",")[1] for line in found.splitlines())


def test_the_shell_completes_options_backbones_and_keys() -> None:
    assert completed("astuner", "--back") == ["--backbone"]
    assert completed("astuner", "--conf", "a.yaml", "--backbone", "l") == ["local"]
    assert completed("astuner", "--conf", "a.yaml", "astuner.rollout.num_r") == ["astuner.rollout.num_repeat="]
    assert "check" in completed("astuner", "c")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_an_output_whose_encoding_lacks_a_character_has_an_escape(
    records: None, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding, write_through=True))
    monkeypatch.setattr(sys, "argv", ["astuner", "runs"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert b"\\u2192" in written.getvalue()


@pytest.mark.parametrize(
    ("shell", "files"),
    [
        ("bash", [".bashrc", ".local/share/astuner/completion.bash"]),
        ("zsh", [".local/share/astuner/completion.zsh", ".zshrc"]),
        ("fish", [".config/fish/completions/astuner.fish"]),
    ],
)
def test_completion_is_installed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: str, files: list[str]
) -> None:
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "ZDOTDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SHELL", f"/usr/bin/{shell}")
    if shell == "bash":
        (tmp_path / ".bashrc").write_text("alias a=b")
    for _ in range(2):
        assert CliRunner().invoke(command, ["completion", "--install"]).exit_code == 0
    written = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file())
    assert written == files
    if shell == "bash":
        first, second = (tmp_path / ".bashrc").read_text().splitlines()
        assert first == "alias a=b"
        assert "completion.bash" in second
        script = (tmp_path / ".local/share/astuner/completion.bash").read_text()
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    printed = CliRunner().invoke(command, ["completion", shell]).output
    assert "_ASTUNER_COMPLETE" in printed


def test_a_shell_without_completion_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    result = CliRunner().invoke(command, ["completion"])
    assert result.exit_code == 2
    assert "the shell 'tcsh' has no completion; name one of: bash, zsh, fish" in result.output


def test_the_list_of_runs_needs_no_pytorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_run("one", 0.5)
    code = (
        "import sys; sys.argv = ['astuner', 'runs']\n"
        "from astuner.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=120)
