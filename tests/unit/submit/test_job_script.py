"""job.sh: golden files, and hostile values, which must be quoted for the shell and for sbatch's parser."""

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


def make_input(
    env: dict[str, str] | None = None, profile: ClusterProfile | None = None, device: str = "cuda", **more: Any
) -> ScriptInput:
    """Return an input with fixed paths.

    Args:
        more: script, run, home, python, code, secret_env and wrapped; the others are fields of the job.
    """
    names = ("script", "run", "home", "python", "code", "secret_env", "wrapped")
    input_fields = {k: more.pop(k) for k in names if k in more}
    job = JobSpec(**{"backend": "slurm", **more})
    # 48 divides over every number of ranks in this file.
    spec = RunSpec(
        job=job,
        env=env or {},
        secret_env=input_fields.get("secret_env", ()),
        recipe=Recipe(train=TrainSpec(global_batch=48)),
        script=input_fields.get("script"),
        wrapped=input_fields.get("wrapped", False),
    )
    profile = profile or ClusterProfile()
    home = Path(input_fields.get("home", "/shared/ct"))
    return ScriptInput(
        run=RunDir(Path(input_fields.get("run", home / "runs" / "demo-abcdef"))),
        spec=spec,
        profile=profile,
        plan=plan(spec, profile, device),
        python=input_fields.get("python", "/opt/venv/bin/python"),
        home=home,
        code_paths=input_fields.get("code", ()),
    )


CASES = {
    "slurm-gpu": make_input(nodes=4, gpus=4, gpu_type="h100", cpus_per_gpu=8, time="4:00:00", partition="main"),
    "slurm-gres-profile": make_input(
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
    "slurm-cpu": make_input(gpus=4, device="cpu", env={"A": "x $(touch pwned)", "PYTHONPATH": "/my/lib"}),
    "slurm-script": make_input(
        gpus=2,
        script=ScriptSpec(path="train.py", cwd="/home/me"),
        code=(Path("/shared/ct/runs/demo-abcdef/code"), Path("/shared/ct/runs/demo-abcdef/code/src")),
    ),
    "local": make_input(nodes=2, gpus=2, device="cpu", backend="local"),
    "wrapped": make_input(
        nodes=2,
        gpus=4,
        wrapped=True,
        profile=ClusterProfile(setup=("module load not-again",), fabric_interface="ib0"),
        script=ScriptSpec(path="train.py", cwd="/home/me", command=("python", "train.py"), path_index=1),
        code=(Path("/shared/ct/runs/demo-abcdef/code"),),
    ),
    "slurm-secrets": make_input(gpus=1, device="cpu", env={"A": "b", "TOKEN": "s3cret"}, secret_env=("TOKEN",)),
}


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str) -> None:
    """To update the files: CLUSTERTRAIN_WRITE_GOLDEN=1 python -m pytest tests/unit/submit/test_job_script.py"""
    text = render_job_script(CASES[name])
    path = GOLDEN / f"{name}.sh"
    if os.environ.get("CLUSTERTRAIN_WRITE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


def hostile_inputs() -> list[ScriptInput]:
    inputs = [
        make_input(name=h, partition=h, account=h, constraint=h, env={"V": h, "W": f"{h}\n{h}"}, sbatch={"comment": h})
        for h in HOSTILE
    ]
    inputs += [make_input(home=f"/shared/{h}/ct", python=f"/opt/{h}/python", code=(Path(f"/x/{h}"),)) for h in HOSTILE]
    inputs += [
        make_input(backend=backend, nodes=nodes, device=device, gpu_type=gpu_type, cpus_per_gpu=cpus)
        for backend, nodes, device, gpu_type, cpus in itertools.product(
            ("slurm", "local"), (1, 3), ("cpu", "cuda"), ("", "h100"), (0, 4)
        )
    ]
    return [*inputs, *CASES.values()]


@pytest.mark.long
def test_shellcheck_and_bash_accept_all_variants(tmp_path: Path) -> None:
    scripts = []
    for n, script_input in enumerate(hostile_inputs()):
        path = tmp_path / f"{n}.sh"
        path.write_text(render_job_script(script_input))
        scripts.append(str(path))
        subprocess.run(["bash", "-n", path], check=True)
    shellcheck = Path(sys.executable).parent / "shellcheck"
    result = subprocess.run([shellcheck, *scripts], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


def run_in_bash(text: str, tmp_path: Path, *show: str) -> list[str]:
    """Run job.sh with an interpreter that records its environment and arguments.

    Returns:
        The values of the variables ``show``, then the arguments.
    """
    output = tmp_path / "seen"
    spy = tmp_path / "spy"
    spy.write_text(
        f"#!{sys.executable} -I\nimport os, sys\n"
        f"open({str(output)!r}, 'w').write('\\0'.join([*(os.environ[n] for n in {list(show)!r}), *sys.argv[1:]]))\n"
    )
    spy.chmod(0o755)
    text = text.replace("agent_python=/opt/venv/bin/python", f"agent_python={shlex.quote(str(spy))}")
    subprocess.run(["bash", "-c", text], check=True, cwd=tmp_path, env={"PATH": os.environ["PATH"], "TAKEN": "mine"})
    assert not (tmp_path / "pwned").exists()
    return output.read_text().split("\0")


@pytest.mark.parametrize("value", [*HOSTILE, "two\nlines", "tab\there", ""])
def test_values_survive_quoting(value: str, tmp_path: Path) -> None:
    values = run_in_bash(render_job_script(make_input(env={"V": value}, home="/sh ared/$(touch pwned)")), tmp_path, "V",
                          "CLUSTERTRAIN_HOME", "CLUSTERTRAIN_RUN_DIR")  # fmt: skip
    assert values[:3] == [value, "/sh ared/$(touch pwned)", "/sh ared/$(touch pwned)/runs/demo-abcdef"]


@pytest.mark.parametrize("value", [*HOSTILE, "two\nlines", "tab\there", ""])
def test_secrets_survive_quoting_and_are_not_in_script(value: str, tmp_path: Path) -> None:
    secret_input = make_input(
        env={"V": value, "NCCL_DEBUG": value}, secret_env=("V", "NCCL_DEBUG"), run=tmp_path / "ru n$(x)"
    )
    secret_input.run.path.mkdir()
    secret_input.run.secrets.write_text(render.format_secrets(secret_input.spec))
    text = render_job_script(secret_input)
    assert run_in_bash(text, tmp_path, "V", "NCCL_DEBUG")[:2] == [value, value]
    assert render.redact_secrets(secret_input.spec).env == {}


def test_script_without_secrets_file_does_not_start(tmp_path: Path) -> None:
    text = render_job_script(make_input(env={"V": "x"}, secret_env=("V",), run=tmp_path))
    assert subprocess.run(["bash", "-c", text], check=False, capture_output=True).returncode == 78


def test_batch_command_and_step(tmp_path: Path) -> None:
    values = run_in_bash(render_job_script(make_input(nodes=2, gpus=4, cpus_per_gpu=3)), tmp_path)
    spy = str(tmp_path / "spy")
    assert values[:5] == ["-P", "-m", "clustertrain", "batch", "--"]
    step = values[5:]
    assert step[0] == "srun" and step[-4:] == ["-P", "-m", "clustertrain", "agent"] and step[-5] == spy
    # srun does not inherit the cores since 22.05, and the end of one node must not kill the others.
    for option in ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=4", "--cpus-per-task=12", "--export=ALL",
                   "--kill-on-bad-exit=0", "--wait=0"):  # fmt: skip
        assert option in step


def test_local_step(tmp_path: Path) -> None:
    text = render_job_script(make_input(backend="local", nodes=3, gpus=2, device="cpu"))
    assert "#SBATCH" not in text
    values = run_in_bash(text, tmp_path)
    assert values[5:] == [str(tmp_path / "spy"), "-P", "-m", "clustertrain.scheduler.local_srun", "--nodes", "3",
                           "--gpus", "2", "--", str(tmp_path / "spy"), "-P", "-m", "clustertrain", "agent"]  # fmt: skip


def test_user_environment_wins_over_plan(tmp_path: Path) -> None:
    profile = ClusterProfile(fabric_interface="it's $(touch pwned)", setup=("export OMP_NUM_THREADS=7",))
    values = run_in_bash(
        render_job_script(make_input(gpus=4, profile=profile)), tmp_path, "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS"
    )
    assert values[:2] == ["it's $(touch pwned)", "7"]


def test_snapshot_is_first_on_pythonpath(tmp_path: Path) -> None:
    script_input = make_input(env={"PYTHONPATH": "/my/lib"}, code=(Path("/c o/code"), Path("/c o/code/src")))
    assert run_in_bash(render_job_script(script_input), tmp_path, "PYTHONPATH")[0] == "/c o/code:/c o/code/src:/my/lib"
    assert run_in_bash(render_job_script(make_input(code=(Path("/c"),))), tmp_path, "PYTHONPATH")[0] == "/c"


def parse_directive(line: str) -> str:
    """Parse one word as sbatch does (src/sbatch/opt.c, documented in its man page).

    Both kinds of quotes group, a backslash escapes anywhere, and an unquoted # ends the line.
    """
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
    text = render_job_script(make_input(account=value))
    (line,) = [line for line in text.splitlines() if line.startswith("#SBATCH --account")]
    assert parse_directive(line.removeprefix("#SBATCH ")) == f"--account={value}"
    assert templates.quote_directive("plain-1.2_x:3,4") == "plain-1.2_x:3,4"


@pytest.mark.parametrize("field", ["account", "partition", "nodelist", "dependency"])
@pytest.mark.parametrize("value", ["a\n#SBATCH --uid=0", "a\rb", "a\0b", "a\x1bb"])
def test_control_characters_are_refused(field: str, value: str) -> None:
    with pytest.raises(ConfigError, match="control characters"):
        render_job_script(make_input(**{field: value}))


# sbatch accepts abbreviated options (getopt_long).
@pytest.mark.parametrize("key", ["nodes", "chdir", "output", "time", "array", "--wrap", "cpus_per_task", "signal",
                                 "arra", "open-m", "ntasks-per", "gpus-per"])  # fmt: skip
def test_managed_options_are_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="clustertrain sets"):
        render_job_script(make_input(sbatch={key: "1"}))


@pytest.mark.parametrize("key", ["", "p", "a b", "x;y", "$(x)", "K=V", "comment\n"])
def test_sbatch_key_must_be_option_name(key: str) -> None:
    with pytest.raises(ConfigError, match="not the name"):
        render_job_script(make_input(sbatch={key: "1"}))


def test_other_gres_is_added_to_gpus() -> None:
    """sbatch uses only the last of several --gres."""
    by_gres = ClusterProfile(gpus_flag="gres")
    text = render_job_script(make_input(gpus=4, gpu_type="h100", profile=by_gres, sbatch={"gres": "lscratch:100"}))
    last = [line for line in text.splitlines() if line.startswith("#SBATCH --gres=")][-1]
    assert last == "#SBATCH --gres=gpu:h100:4,lscratch:100"
    assert "#SBATCH --gres=lscratch:100\n" in render_job_script(make_input(gpus=4, sbatch={"gres": "lscratch:100"}))


@pytest.mark.parametrize("value", ["gpu:2", "lscratch:1,gpu:a100:2", "gpu"])
def test_gpu_gres_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="requests the GPUs"):
        render_job_script(make_input(sbatch={"gres": value}))


def test_user_options_come_last_and_may_be_flags() -> None:
    text = render_job_script(make_input(sbatch={"mail_type": "END", "exclusive": ""}))
    directives = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert directives[-2:] == ["#SBATCH --mail-type=END", "#SBATCH --exclusive"]


@pytest.mark.parametrize("name", ["1A", "A-B", "A B", "", "A=B", "UID", "CLUSTERTRAIN_RUN_DIR", "$(x)"])
def test_bad_environment_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="env "):
        render.check_environment({name: "x"})


def test_signal_only_with_time_limit() -> None:
    assert "#SBATCH --signal=USR2@120" in render_job_script(make_input(time="1:00:00"))
    assert "--signal" not in render_job_script(make_input())
    assert "--signal" not in render_job_script(make_input(time="UNLIMITED"))


def test_cpu_requests_devices_only_with_gpu_type() -> None:
    assert "--gpus-per-node" not in render_job_script(make_input(gpus=4, device="cpu"))
    assert "#SBATCH --gpus-per-node=h100:4" in render_job_script(make_input(gpus=4, device="cpu", gpu_type="h100"))
    assert "#SBATCH --gres=gpu:h100:4" in render_job_script(
        make_input(gpus=4, gpu_type="h100", profile=ClusterProfile(gpus_flag="gres"))
    )
