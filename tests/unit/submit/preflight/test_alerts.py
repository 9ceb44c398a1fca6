"""Notes of `submit` on the destinations of alerts."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from clustertrain.config.telemetry import AlertsSpec
from clustertrain.submit.preflight import alerts

URL = "https://hooks.example.org/secret"


def notes(
    spec: AlertsSpec, *, share: bool = False, environ: Mapping[str, str] = {}, env_option: Mapping[str, str] = {}
) -> list[str]:
    return alerts.check_alerts(spec, share=share, environ=environ, public_env=env_option)


def test_valid_alerts_have_no_notes(tmp_path: Path) -> None:
    assert notes(AlertsSpec(), share=True) == []
    assert notes(AlertsSpec(command=[sys.executable])) == []
    assert notes(AlertsSpec(webhook_env="HOOK"), environ={"HOOK": URL}, share=True) == []
    file = tmp_path / "hook"
    file.write_text(URL)
    file.chmod(0o600)
    assert notes(AlertsSpec(webhook_file=str(file)), share=True) == []


def test_notes_omit_the_secret() -> None:
    spec = AlertsSpec(command=["no-such-program-at-all"], webhook="http://hooks.example.org/secret")
    texts = notes(spec, share=True)
    assert len(texts) == 2
    assert "no-such-program-at-all" in texts[0] and "unencrypted" in texts[1]
    assert "secret" not in " ".join(texts)


def test_shared_command_arguments_are_noted() -> None:
    spec = AlertsSpec(command=[sys.executable, "--token", "secret"])
    assert notes(spec) == []
    (note,) = notes(spec, share=True)
    assert "--share" in note and "--env" in note and "secret" not in note


def test_webhook_variable_missing_or_recorded() -> None:
    (missing,) = notes(AlertsSpec(webhook_env="HOOK"))
    assert "HOOK is not set here" in missing
    (recorded,) = notes(AlertsSpec(webhook_env="HOOK"), env_option={"HOOK": URL})
    assert "spec.toml and job.sh" in recorded and "secret" not in recorded


def test_webhook_file_missing_or_readable_by_others(tmp_path: Path) -> None:
    file = tmp_path / "hook"
    assert "No such file" in notes(AlertsSpec(webhook_file=str(file)))[0]
    file.write_text(URL)
    file.chmod(0o640)
    (note,) = notes(AlertsSpec(webhook_file=str(file)))
    assert "chmod 600" in note and "secret" not in note
