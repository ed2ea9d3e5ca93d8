"""Section `services`: valid entries, and the errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from astuner.config.loading import load_config
from astuner.config.services import HealthConfig, ServiceConfig
from astuner.config.yaml_file import to_yaml
from astuner.errors import ConfigError

Write = Callable[..., Path]


def test_a_service_is_text_or_words_and_survives_being_written(write: Write, minimal: str) -> None:
    text = minimal + (
        "  services:\n"
        "    short: {command: python -m x --name 'two words', env: {PORT: 8080}}\n"
        "    long: {command: [x, '2'], cwd: there, ports: [1, 65535], health: {port: 9}, timeout: 5, restart: true}\n"
    )
    services = load_config(write(text)).config.astuner.services
    assert services["short"].argv == ["python", "-m", "x", "--name", "two words"]
    assert services["short"].env == {"PORT": "8080"}
    assert services["long"] == ServiceConfig(
        command=["x", "2"], cwd="there", ports=[1, 65535], health=HealthConfig(port=9), timeout=5.0, restart=True
    )
    dumped = to_yaml(load_config(write(text)).config)
    assert load_config(write(dumped)).config.astuner.services == services


def test_the_command_line_changes_a_service(write: Write, minimal: str) -> None:
    path = write(minimal + "  services: {a: {command: x, timeout: 1}}\n")
    changed = load_config(path, ["astuner.services.a.timeout=5"]).config.astuner.services
    assert changed["a"].timeout == 5
    assert load_config(write(minimal), ["astuner.services={b: {command: y}}"]).config.astuner.services["b"].argv == [
        "y"
    ]


@pytest.mark.parametrize(
    ("services", "message"),
    [
        ("{a: {command: x, timeout: 0}}", "astuner.services.a.timeout is 0; expected a number greater than 0"),
        ("{a: {cwd: x}}", "astuner.services.a has no command, which is required"),
        ("{a: {command: x, comand: y}}", "unknown key 'astuner.services.a.comand'; did you mean '.*a.command'"),
        ("{a: {command: x, health: {url: y}}}", "unknown key 'astuner.services.a.health.url'; there are http, port"),
        ("{a: {command: 'x \"'}}", r"a.command is .*; expected a command line \(No closing quotation\)"),
        ("{a: {command: []}}", r"a.command is \[\]; expected a command line, as text or as a list"),
        ("{a: {command: x, health: {http: y}}}", "health.http is 'y'; expected an address such as http://"),
        ("{a: {command: x, health: {http: 'http://y', port: 1}}}", "health is .*; expected http or port, not both"),
        ("{a: {command: x, ports: [0]}}", "an item of astuner.services.a.ports is 0; expected a number of at least 1"),
        ("{a: {command: x, restart: -1}}", "a.restart is -1; expected true or false or a number of at least 0"),
        ("{a: {command: x, env: {B: true}}}", r"a.env.B is True; expected text \(in quotes"),
        ("{ray: {command: x}}", "a name in astuner.services is 'ray'; expected another name: --with-ray is built in"),
        ("{a b: {command: x}}", "a name in astuner.services is 'a b'; expected a name of letters, digits"),
    ],
)
def test_mistakes_are_named_with_their_line(write: Write, minimal: str, services: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"run.yaml:6: .*{message}"):
        load_config(write(minimal + f"  services:\n    {services}\n"))
