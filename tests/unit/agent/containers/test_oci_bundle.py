"""The configuration that runc and crun get."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from clustertrain.agent.containers import oci_bundle
from clustertrain.agent.containers.spec import Container
from clustertrain.config.container import Mount


def build(image: dict[str, Any]) -> dict[str, Any]:
    container = Container(
        name="a", image="/image", kind="bundle", root=Path("/image/rootfs"), command=("python", "-V"), cwd="/project",
        python_path="", env={"A": "b c\n"}, mounts=(Mount("/data", "/in", read_only=True),), folder=Path("/ranks"),
        pid_path=Path("/pid"),
    )  # fmt: skip
    return oci_bundle.build_config(container, image)


def test_process_mounts_and_namespaces_replace_those_of_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    config = build(
        {
            "root": {"path": "rootfs", "readonly": False},
            "hostname": "image",
            "process": {"args": ["sh"], "terminal": True, "rlimits": [{"type": "RLIMIT_NOFILE", "hard": 1, "soft": 1}]},
            "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"}],
            "linux": {"seccomp": {"defaultAction": "SCMP_ACT_ALLOW"}, "namespaces": [{"type": "pid"}]},
            "hooks": {"prestart": [{"path": "/hook"}]},
        }
    )
    process = config["process"]
    assert process["args"][-2:] == ["python", "-V"]
    assert (process["env"], process["terminal"], process["user"]) == (["A=b c\n"], False, {"uid": 0, "gid": 0})
    assert not {"rlimits", "hostname"} & (process.keys() | config.keys())
    assert config["root"] == {"path": "/image/rootfs", "readonly": False}
    assert [m["destination"] for m in config["mounts"]] == ["/proc", "/sys", "/dev", "/in"]
    assert config["mounts"][-1]["options"] == ["rbind", "rprivate", "ro"]
    assert config["linux"]["namespaces"] == [{"type": "mount"}]
    assert config["linux"]["seccomp"] == {"defaultAction": "SCMP_ACT_ALLOW"}
    assert config["hooks"] == {"prestart": [{"path": "/hook"}]}


def test_user_without_privileges_is_root_in_a_user_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(os, "getegid", lambda: 100)
    linux = build({})["linux"]
    assert linux["namespaces"] == [{"type": "mount"}, {"type": "user"}]
    assert linux["uidMappings"] == [{"containerID": 0, "hostID": 1000, "size": 1}]
    assert linux["gidMappings"] == [{"containerID": 0, "hostID": 100, "size": 1}]
