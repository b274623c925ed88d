import json
from unittest import mock

import pytest
from typer.testing import CliRunner

from stackcheck.cli.host import app
from stackcheck.engine import container, doctor, host_setup
from stackcheck.engine.client import Engine
from stackcheck.errors import EngineError


@pytest.fixture
def no_engine(monkeypatch) -> None:
    def refuse() -> Engine:
        raise EngineError("there is no container engine", got="nothing answers")

    monkeypatch.setattr(Engine, "connect", refuse)
    monkeypatch.setattr(host_setup, "has_buildx", lambda: False)


@pytest.mark.usefixtures("no_engine")
def test_what_is_lacking_has_the_command_that_mends_it(tmp_path):
    findings = {finding.name: finding for finding in doctor.examine(tmp_path)}
    assert not findings["engine"].ok
    assert findings["engine"].fix == "sudo stackcheck doctor --fix"
    assert findings["buildx"].fix == "stackcheck doctor --fix"
    assert {"disk", "memory", "amd GPUs", "nvidia GPUs", "mmdebstrap"} <= set(findings)


@pytest.mark.usefixtures("no_engine")
def test_a_host_that_cannot_build_exits_with_4_and_still_lists_everything(tmp_path):
    result = CliRunner().invoke(app, ["doctor", "--json", "--root", str(tmp_path)])
    assert isinstance(result.exception, EngineError)
    assert result.exception.exit_code == 4
    names = [finding["name"] for finding in json.loads(result.stdout)]
    assert names[0] == "engine"


@pytest.mark.parametrize(
    ("version", "repeats"), [("20.10.24", False), ("24.0.7", False), ("26.1.5+dfsg1", True), ("29.1.3", True)]
)
def test_an_engine_whose_builds_have_no_fixed_digest_is_named(version, repeats, tmp_path, monkeypatch):
    client = mock.Mock(**{"info.return_value": {"ServerVersion": version}})
    monkeypatch.setattr(Engine, "connect", lambda: Engine(client))
    found = next(one for one in doctor.examine(tmp_path) if one.name == "same digest")
    assert (found.ok, found.needed, found.fix is None) == (repeats, False, repeats)


def test_an_unreachable_registry_is_not_needed_but_said(tmp_path):
    finding = doctor.examine(tmp_path, ["127.0.0.1:9"])[-1]
    assert (finding.name, finding.ok, finding.needed) == ("registry 127.0.0.1:9", False, False)


@pytest.mark.parametrize("pid", [None, 4711])
def test_a_full_disk_is_found(tmp_path, monkeypatch, pid):
    monkeypatch.setattr(host_setup, "daemon_pid", lambda: pid)
    findings = doctor.examine(tmp_path, room_bytes=10**18)
    finding = next(finding for finding in findings if finding.name == "disk")
    assert not finding.ok
    assert finding.fix
    assert finding.fix.startswith("free space under" if pid else "docker builder prune")


def test_the_disk_that_must_be_free_can_be_named(tmp_path):
    result = CliRunner().invoke(app, ["doctor", "--json", "--root", str(tmp_path), "--room", "1000000000"])
    assert isinstance(result.exception, EngineError)
    disk = next(finding for finding in json.loads(result.stdout) if finding["name"] == "disk")
    assert "1000000000 GB needed" in disk["found"]


@pytest.mark.parametrize("body", ["", "#!/bin/sh\nprintf '\\377'", "#!/bin/sh\nexit 3"])
def test_a_docker_that_is_none_lacks_buildx(body, tmp_path, monkeypatch):
    (tmp_path / "docker").write_text(body)
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not host_setup.has_buildx()
    assert doctor._buildx().found


@pytest.mark.parametrize("config", ["[]", "5", '{"proxies": [1]}', "[" * 100_000])
def test_dockers_settings_of_any_shape_are_an_error(config, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(config)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:1")
    with pytest.raises(EngineError, match="docker's settings"):
        container.opened(1.0)
