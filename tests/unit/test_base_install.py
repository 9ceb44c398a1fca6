"""The base install, without torch and the other extras: what works, and what names the extra that it needs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from clustertrain import extras
from tests.base_environment import BaseInstall, build_base_environment
from tests.paths import ROOT

pytestmark = pytest.mark.long
LOCAL = ("submit", "--backend", "local", "--device", "cpu")
SESSION = "import clustertrain as ct\n\nwith ct.session() as session:\n    pass\n"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_base_environment(tmp_path_factory.mktemp("base"))


@pytest.fixture
def base(python: Path, tmp_path: Path) -> BaseInstall:
    (tmp_path / "gpt.toml").write_text("[train]\nsteps = 3\nglobal_batch = 2\n")
    (tmp_path / "session.py").write_text(SESSION)
    (tmp_path / "plain.py").write_text("import os\nprint('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n")
    return BaseInstall(python, tmp_path)


def test_no_package_of_an_extra_is_there(base: BaseInstall) -> None:
    program = "import importlib.util, sys; print([n for n in sys.argv[1:] if importlib.util.find_spec(n)])"
    assert base.run_python("-c", program, *extras.EXTRAS).stdout == "[]\n"


def test_a_command_runs_and_is_reported(base: BaseInstall) -> None:
    base(*LOCAL, "--gpus", "2", "--wait", "--", "python", "plain.py")
    assert "completed" in base("status") and "completed" in base("list")
    assert "rank 0 of 2" in base("logs")
    assert "all ranks completed" in base("top", "--once")
    assert "Where the time went" in base("telemetry")
    base("telemetry", "--html", "report.html")
    assert (base.cwd / "report.html").stat().st_size > 10_000
    assert "no checkpoints" in base("checkpoint", "list", "latest")
    for command in ("cancel", "requeue"):
        assert "completed" in base(command, "latest", code=1)
    events = [json.loads(line) for line in next((base.cwd / "home").rglob("agent-*.jsonl")).read_text().splitlines()]
    assert not {"telemetry_failed", "exporter_failed"} & {event["event"] for event in events}


def test_a_script_without_a_session_needs_no_torch(base: BaseInstall) -> None:
    output = base(*LOCAL, "--gpus", "2", "--wait", "plain.py")
    assert "plain.py opens no session of clustertrain" in output and "without torch" in output
    assert "rank 0 of 2" in base("logs")


def test_plans_need_no_torch(base: BaseInstall) -> None:
    model = ("--set", "model.preset=llama3.1-8b")
    assert "layout" in base("plan", "--nodes", "2", "--gpus", "8", "--gpu-type", "h100", *model)
    assert "agent_python=" in base(*LOCAL, "--dry-run", "--", "python", "plain.py")


@pytest.mark.parametrize("target", ["gpt.toml", "session.py"])
def test_ranks_without_torch_are_refused_before_the_queue(base: BaseInstall, target: str) -> None:
    output = base(*LOCAL, target, code=78)
    assert f"{target}" in output and f"torch is not installed for {base.python}" in output
    assert f"{base.python} -m pip install 'clustertrain[train]'" in output and "--python" in output
    assert not (base.cwd / "home" / "runs").exists()


@pytest.mark.parametrize("target", ["gpt.toml", "session.py"])
def test_another_python_for_the_ranks_is_accepted(base: BaseInstall, target: str) -> None:
    # Its clustertrain is that of these tests.
    base.environ["PYTHONPATH"] = str(ROOT)
    assert f"agent_python={sys.executable}\n" in base(*LOCAL, "--dry-run", "--python", sys.executable, target)
    profiles = base.cwd / "config" / "clustertrain" / "clusters"
    profiles.mkdir(parents=True)
    (profiles / "site.toml").write_text(f'python = "{sys.executable}"\n')
    base.environ["XDG_CONFIG_HOME"] = str(base.cwd / "config")
    assert f"agent_python={sys.executable}\n" in base(*LOCAL, "--dry-run", "--cluster", "site", target)


def test_python_of_the_shell_is_used_if_it_has_torch(base: BaseInstall) -> None:
    base.environ["PYTHONPATH"] = str(ROOT)
    base.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{base.environ['PATH']}"
    output = base(*LOCAL, "--dry-run", "gpt.toml")
    assert f"the python of this shell: {base.python} has no torch" in output


@pytest.mark.parametrize(
    ("argv", "extra"),
    [
        (("diagnose", "gpt.toml"), "train"),
        (("telemetry", "--csv", "x.csv"), "report"),
        (("telemetry", "--parquet", "x.parquet"), "report"),
        (("track", "latest", "--to", "tensorboard"), "tensorboard"),
        (("track", "latest", "--to", "wandb"), "wandb"),
        (("track", "latest", "--to", "mlflow"), "mlflow"),
        ((*LOCAL, "--set", 'tracking.trackers=["tensorboard"]', "--", "python", "plain.py"), "tensorboard"),
        ((*LOCAL, "--set", "telemetry.prometheus.port=9400", "--", "python", "plain.py"), "prometheus"),
    ],
    ids=lambda x: " ".join(x[:3]) if isinstance(x, tuple) else x,
)
def test_what_needs_an_extra_names_it(base: BaseInstall, argv: tuple[str, ...], extra: str) -> None:
    if argv[0] in ("telemetry", "track"):
        base(*LOCAL, "--wait", "--", "python", "plain.py")
    output = base(*argv, code=1 if argv[0] == "track" else 78)
    assert f"{base.python} -m pip install 'clustertrain[{extra}]'" in output


def test_session_names_the_extra(base: BaseInstall) -> None:
    output = base.run_python("session.py").stdout
    assert "clustertrain.session: the package torch is not installed" in output
    assert f"{base.python} -m pip install 'clustertrain[train]'" in output


def test_agent_without_torch_names_the_extra(base: BaseInstall) -> None:
    """The set-up of a profile may have promised a torch that it does not bring."""
    done = base.run_python("-m", "clustertrain.agent.ranks.die_with_parent", str(os.getpid()), "torch.distributed.run")
    assert done.returncode == 1
    assert done.stdout == (
        f"torchrun: the package torch is not installed; fix: {base.python} -m pip install 'clustertrain[train]'\n"
    )
