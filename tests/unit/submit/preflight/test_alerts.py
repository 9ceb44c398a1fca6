"""What submit says of where alerts go."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from clustertrain.config.telemetry import AlertsSpec
from clustertrain.submit.preflight import alerts

URL = "https://hooks.example.org/secret"


def notes(
    spec: AlertsSpec, *, share: bool = False, environ: Mapping[str, str] = {}, given: Mapping[str, str] = {}
) -> list[str]:
    return alerts.check_alerts(spec, share=share, environ=environ, public_env=given)


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
    found = notes(spec, share=True)
    assert len(found) == 2
    assert "no-such-program-at-all" in found[0] and "unencrypted" in found[1]
    assert "secret" not in " ".join(found)


def test_shared_command_arguments_are_noted() -> None:
    spec = AlertsSpec(command=[sys.executable, "--token", "secret"])
    assert notes(spec) == []
    (found,) = notes(spec, share=True)
    assert "--share" in found and "--env" in found and "secret" not in found


def test_webhook_variable_missing_or_recorded() -> None:
    (missing,) = notes(AlertsSpec(webhook_env="HOOK"))
    assert "HOOK is not set here" in missing
    (written,) = notes(AlertsSpec(webhook_env="HOOK"), given={"HOOK": URL})
    assert "spec.toml and job.sh" in written and "secret" not in written


def test_webhook_file_missing_or_readable_by_others(tmp_path: Path) -> None:
    file = tmp_path / "hook"
    assert "No such file" in notes(AlertsSpec(webhook_file=str(file)))[0]
    file.write_text(URL)
    file.chmod(0o640)
    (found,) = notes(AlertsSpec(webhook_file=str(file)))
    assert "chmod 600" in found and "secret" not in found
