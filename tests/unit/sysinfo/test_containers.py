"""Kinds of images, and the runtimes that start them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clustertrain.errors import ConfigError, UnsuitableEnvironment
from clustertrain.sysinfo import containers
from clustertrain.sysinfo.containers import Runtime, choose_runtime, find_image_kind


def test_kinds_of_images(tmp_path: Path) -> None:
    (tmp_path / "a.img").write_bytes(b"hsqs\0\0")
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "config.json").write_text("{}")
    (tmp_path / "root" / "usr").mkdir(parents=True)
    assert find_image_kind(str(tmp_path / "a.img")) == "squashfs"
    assert find_image_kind(str(tmp_path / "bundle")) == "bundle"
    assert find_image_kind(str(tmp_path / "root")) == "folder"
    assert find_image_kind("docker://a") == "registry"


def test_first_installed_runtime_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(containers, "_SYSTEM_PATH", str(tmp_path / "sbin"))
    for name in ("bin/ch-run", "bin/singularity", "sbin/runc"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch(mode=0o755)
    environ = {"PATH": str(tmp_path / "bin")}
    assert choose_runtime("/a", "folder", "auto", environ) == Runtime("charliecloud", f"{tmp_path}/bin/ch-run")
    assert choose_runtime("/a", "bundle", "auto", environ) == Runtime("runc", f"{tmp_path}/sbin/runc")
    assert choose_runtime("/a", "sif", "auto", environ) == Runtime("apptainer", f"{tmp_path}/bin/singularity")
    with pytest.raises(
        UnsuitableEnvironment, match=r"(?s)'crun': it is not installed.*or use runc, charliecloud or apptainer"
    ):
        choose_runtime("/a", "bundle", "crun", environ)
    with pytest.raises(
        ConfigError,
        match=r"(?s)'enroot': cannot start an OCI bundle.*use crun, runc, podman, charliecloud or apptainer",
    ):
        choose_runtime("/a", "bundle", "enroot", environ)


@pytest.mark.parametrize("text", ["{", "[]", json.dumps({"root": 1}), json.dumps({"root": {"path": 1}})])
def test_damaged_bundle(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        containers.read_bundle(tmp_path)
