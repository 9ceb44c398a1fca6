"""job.sh: golden files, and hostile values that must reach neither the shell nor sbatch's parser unquoted."""

from __future__ import annotations

import itertools
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clustertrain.config.cluster import ClusterProfile
from clustertrain.config.job import JobSpec, RunSpec, ScriptSpec
from clustertrain.config.recipe import Recipe
from clustertrain.config.train import TrainSpec
from clustertrain.errors import ConfigError
from clustertrain.plan.planner import plan
from clustertrain.run.run_dir import RunDir
from clustertrain.submit import job_script as render
from clustertrain.submit import templates
from clustertrain.submit.job_script import ScriptInput, render_job_script

GOLDEN = Path(__file__).parent / "golden"
HOSTILE = (
    "a b",
    "it's",
    'say "x"',
    "$(touch pwned)",
    "`touch pwned`",
    "${HOME}",
    "a;touch pwned;b",
    "a\\",
    "back\\slash \\\" '",
    "100%j %x",
    "#comment",
    "a # b",
    "-rf",
    "*",
    "~",
    "é ü 漢",
    "!history",
    "a&b|c>d<e",
)


def given(
    env: dict[str, str] | None = None, profile: ClusterProfile | None = None, device: str = "cuda", **more: Any
) -> ScriptInput:
    """Input with fixed paths. ``more``: script, run, home, python, code, secret_env; the rest are fields of the job."""
    outer = {k: more.pop(k) for k in ("script", "run", "home", "python", "code", "secret_env") if k in more}
    job = JobSpec(**{"backend": "slurm", **more})
    # 48 divides over every number of ranks here.
    spec = RunSpec(
        job=job,
        env=env or {},
        secret_env=outer.get("secret_env", ()),
        recipe=Recipe(train=TrainSpec(global_batch=48)),
        script=outer.get("script"),
    )
    profile = profile or ClusterProfile()
    home = Path(outer.get("home", "/shared/ct"))
    return ScriptInput(
        run=RunDir(Path(outer.get("run", home / "runs" / "demo-abcdef"))),
        spec=spec,
        profile=profile,
        plan=plan(spec, profile, device),
        python=outer.get("python", "/opt/venv/bin/python"),
        home=home,
        code_paths=outer.get("code", ()),
    )


CASES = {
    "slurm-gpu": given(nodes=4, gpus=4, gpu_type="h100", cpus_per_gpu=8, time="4:00:00", partition="main"),
    "slurm-gres-profile": given(
        nodes=2,
        gpus=8,
        profile=ClusterProfile(
            setup=("module load cuda/12.4", "ulimit -l unlimited"), gpus_flag="gres", fabric_interface="ib0"
        ),
        account="proj 1",
        constraint="a100&ib",
        dependency="afterok:12",
        mem="0",
        max_requeues=0,
        sbatch={"mail-user": "me@example.org", "exclusive": ""},
    ),
    "slurm-cpu": given(gpus=4, device="cpu", env={"A": "x $(touch pwned)", "PYTHONPATH": "/my/lib"}),
    "slurm-script": given(
        gpus=2,
        script=ScriptSpec(path="train.py", cwd="/home/me"),
        code=(Path("/shared/ct/runs/demo-abcdef/code"), Path("/shared/ct/runs/demo-abcdef/code/src")),
    ),
    "local": given(nodes=2, gpus=2, device="cpu", backend="local"),
    "slurm-secrets": given(gpus=1, device="cpu", env={"A": "b", "TOKEN": "s3cret"}, secret_env=("TOKEN",)),
}


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str) -> None:
    """After a change on purpose: CLUSTERTRAIN_WRITE_GOLDEN=1 python -m pytest tests/unit/submit/test_job_script.py"""
    text = render_job_script(CASES[name])
    path = GOLDEN / f"{name}.sh"
    if os.environ.get("CLUSTERTRAIN_WRITE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


def hostile_inputs() -> list[ScriptInput]:
    made = [
        given(name=h, partition=h, account=h, constraint=h, env={"V": h, "W": f"{h}\n{h}"}, sbatch={"comment": h})
        for h in HOSTILE
    ]
    made += [given(home=f"/shared/{h}/ct", python=f"/opt/{h}/python", code=(Path(f"/x/{h}"),)) for h in HOSTILE]
    made += [
        given(backend=backend, nodes=nodes, device=device, gpu_type=gpu_type, cpus_per_gpu=cpus)
        for backend, nodes, device, gpu_type, cpus in itertools.product(
            ("slurm", "local"), (1, 3), ("cpu", "cuda"), ("", "h100"), (0, 4)
        )
    ]
    return [*made, *CASES.values()]


def test_shellcheck_and_bash_accept_all_variants(tmp_path: Path) -> None:
    scripts = []
    for n, one in enumerate(hostile_inputs()):
        path = tmp_path / f"{n}.sh"
        path.write_text(render_job_script(one))
        scripts.append(str(path))
        subprocess.run(["bash", "-n", path], check=True)
    shellcheck = Path(sys.executable).parent / "shellcheck"
    done = subprocess.run([shellcheck, *scripts], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def run_in_bash(text: str, tmp_path: Path, *show: str) -> list[str]:
    """Run job.sh with an interpreter that only writes down what it got; the values of ``show`` come first."""
    seen = tmp_path / "seen"
    spy = tmp_path / "spy"
    spy.write_text(
        f"#!{sys.executable} -I\nimport os, sys\n"
        f"open({str(seen)!r}, 'w').write('\\0'.join([*(os.environ[n] for n in {list(show)!r}), *sys.argv[1:]]))\n"
    )
    spy.chmod(0o755)
    text = text.replace("agent_python=/opt/venv/bin/python", f"agent_python={shlex.quote(str(spy))}")
    subprocess.run(["bash", "-c", text], check=True, cwd=tmp_path, env={"PATH": os.environ["PATH"], "TAKEN": "mine"})
    assert not (tmp_path / "pwned").exists()
    return seen.read_text().split("\0")


@pytest.mark.parametrize("value", [*HOSTILE, "two\nlines", "tab\there", ""])
def test_values_survive_quoting(value: str, tmp_path: Path) -> None:
    arrived = run_in_bash(render_job_script(given(env={"V": value}, home="/sh ared/$(touch pwned)")), tmp_path, "V",
                          "CLUSTERTRAIN_HOME", "CLUSTERTRAIN_RUN_DIR")  # fmt: skip
    assert arrived[:3] == [value, "/sh ared/$(touch pwned)", "/sh ared/$(touch pwned)/runs/demo-abcdef"]


@pytest.mark.parametrize("value", [*HOSTILE, "two\nlines", "tab\there", ""])
def test_secrets_survive_quoting_and_are_not_in_script(value: str, tmp_path: Path) -> None:
    asked = given(env={"V": value, "NCCL_DEBUG": value}, secret_env=("V", "NCCL_DEBUG"), run=tmp_path / "ru n$(x)")
    asked.run.path.mkdir()
    asked.run.secrets.write_text(render.format_secrets(asked.spec))
    text = render_job_script(asked)
    assert run_in_bash(text, tmp_path, "V", "NCCL_DEBUG")[:2] == [value, value]
    assert render.redact_secrets(asked.spec).env == {}


def test_script_without_secrets_file_does_not_start(tmp_path: Path) -> None:
    text = render_job_script(given(env={"V": "x"}, secret_env=("V",), run=tmp_path))
    assert subprocess.run(["bash", "-c", text], check=False, capture_output=True).returncode == 78


def test_batch_command_and_step(tmp_path: Path) -> None:
    arrived = run_in_bash(render_job_script(given(nodes=2, gpus=4, cpus_per_gpu=3)), tmp_path)
    spy = str(tmp_path / "spy")
    assert arrived[:5] == ["-P", "-m", "clustertrain", "batch", "--"]
    step = arrived[5:]
    assert step[0] == "srun" and step[-4:] == ["-P", "-m", "clustertrain", "agent"] and step[-5] == spy
    # srun 22.05 and later does not inherit the cores; and no node's end may kill the others.
    for option in ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=4", "--cpus-per-task=12", "--export=ALL",
                   "--kill-on-bad-exit=0", "--wait=0"):  # fmt: skip
        assert option in step


def test_local_step(tmp_path: Path) -> None:
    text = render_job_script(given(backend="local", nodes=3, gpus=2, device="cpu"))
    assert "#SBATCH" not in text
    arrived = run_in_bash(text, tmp_path)
    assert arrived[5:] == [str(tmp_path / "spy"), "-P", "-m", "clustertrain.scheduler.local_srun", "--nodes", "3",
                           "--gpus", "2", "--", str(tmp_path / "spy"), "-P", "-m", "clustertrain", "agent"]  # fmt: skip


def test_user_environment_wins_over_plan(tmp_path: Path) -> None:
    profile = ClusterProfile(fabric_interface="it's $(touch pwned)", setup=("export OMP_NUM_THREADS=7",))
    arrived = run_in_bash(
        render_job_script(given(gpus=4, profile=profile)), tmp_path, "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS"
    )
    assert arrived[:2] == ["it's $(touch pwned)", "7"]


def test_snapshot_is_first_on_pythonpath(tmp_path: Path) -> None:
    one = given(env={"PYTHONPATH": "/my/lib"}, code=(Path("/c o/code"), Path("/c o/code/src")))
    assert run_in_bash(render_job_script(one), tmp_path, "PYTHONPATH")[0] == "/c o/code:/c o/code/src:/my/lib"
    assert run_in_bash(render_job_script(given(code=(Path("/c"),))), tmp_path, "PYTHONPATH")[0] == "/c"


def parse_directive(line: str) -> str:
    """sbatch's own reading of one word (src/sbatch/opt.c, as documented in the man page): both quotes group, a
    backslash escapes anywhere, an unquoted # ends the line."""
    word, quote, escaped = "", "", False
    for c in line:
        if escaped:
            word, escaped = word + c, False
        elif c == "\\":
            escaped = True
        elif quote:
            quote, word = ("", word) if c == quote else (quote, word + c)
        elif c in "'\"":
            quote = c
        elif c in " \t#":
            break
        else:
            word += c
    assert not quote
    return word


@pytest.mark.parametrize("value", HOSTILE)
def test_directives_survive_sbatch_parser(value: str) -> None:
    text = render_job_script(given(account=value))
    (line,) = [line for line in text.splitlines() if line.startswith("#SBATCH --account")]
    assert parse_directive(line.removeprefix("#SBATCH ")) == f"--account={value}"
    assert templates.quote_directive("plain-1.2_x:3,4") == "plain-1.2_x:3,4"


@pytest.mark.parametrize("field", ["account", "partition", "nodelist", "dependency"])
@pytest.mark.parametrize("value", ["a\n#SBATCH --uid=0", "a\rb", "a\0b", "a\x1bb"])
def test_control_characters_are_refused(field: str, value: str) -> None:
    with pytest.raises(ConfigError, match="control characters"):
        render_job_script(given(**{field: value}))


# sbatch takes the first letters of an option for the option (getopt_long).
@pytest.mark.parametrize("key", ["nodes", "chdir", "output", "time", "array", "--wrap", "cpus_per_task", "signal",
                                 "arra", "open-m", "ntasks-per", "gpus-per"])  # fmt: skip
def test_managed_options_are_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="clustertrain sets"):
        render_job_script(given(sbatch={key: "1"}))


@pytest.mark.parametrize("key", ["", "p", "a b", "x;y", "$(x)", "K=V", "comment\n"])
def test_sbatch_key_must_be_option_name(key: str) -> None:
    with pytest.raises(ConfigError, match="not the name"):
        render_job_script(given(sbatch={key: "1"}))


def test_other_gres_is_added_to_gpus() -> None:
    """Of two --gres sbatch takes the last alone."""
    by_gres = ClusterProfile(gpus_flag="gres")
    text = render_job_script(given(gpus=4, gpu_type="h100", profile=by_gres, sbatch={"gres": "lscratch:100"}))
    last = [line for line in text.splitlines() if line.startswith("#SBATCH --gres=")][-1]
    assert last == "#SBATCH --gres=gpu:h100:4,lscratch:100"
    assert "#SBATCH --gres=lscratch:100\n" in render_job_script(given(gpus=4, sbatch={"gres": "lscratch:100"}))


@pytest.mark.parametrize("value", ["gpu:2", "lscratch:1,gpu:a100:2", "gpu"])
def test_gpu_gres_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="requests the GPUs"):
        render_job_script(given(sbatch={"gres": value}))


def test_user_options_come_last_and_may_be_flags() -> None:
    text = render_job_script(given(sbatch={"mail_type": "END", "exclusive": ""}))
    directives = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert directives[-2:] == ["#SBATCH --mail-type=END", "#SBATCH --exclusive"]


@pytest.mark.parametrize("name", ["1A", "A-B", "A B", "", "A=B", "UID", "CLUSTERTRAIN_RUN_DIR", "$(x)"])
def test_bad_environment_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="env "):
        render.check_environment({name: "x"})


def test_signal_only_with_time_limit() -> None:
    assert "#SBATCH --signal=USR2@120" in render_job_script(given(time="1:00:00"))
    assert "--signal" not in render_job_script(given())
    assert "--signal" not in render_job_script(given(time="UNLIMITED"))


def test_cpu_requests_devices_only_with_gpu_type() -> None:
    assert "--gpus-per-node" not in render_job_script(given(gpus=4, device="cpu"))
    assert "#SBATCH --gpus-per-node=h100:4" in render_job_script(given(gpus=4, device="cpu", gpu_type="h100"))
    assert "#SBATCH --gres=gpu:h100:4" in render_job_script(
        given(gpus=4, gpu_type="h100", profile=ClusterProfile(gpus_flag="gres"))
    )
