"""submit: the files that it writes, and refusals, which leave nothing."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from clustertrain.errors import ClusterTrainError, ConfigError, SchedulerError, UsageError
from clustertrain.report.runs.settings import load_settings
from clustertrain.run import events
from clustertrain.run.run_spec import load_spec
from clustertrain.submit import transaction
from clustertrain.submit.preflight import filesystem
from clustertrain.submit.request import SubmitRequest
from clustertrain.submit.sweep import submit_sweep
from clustertrain.submit.transaction import SubmittedRun, dry_run, submit
from tests.fakes.slurm.fixture import FakeSlurm

pytestmark = pytest.mark.long

HOSTILE = "a b'\"$(touch pwned)`x`\n%j\\"


def submit_run(tmp_path: Path, target: str = "", **more: Any) -> SubmittedRun:
    return submit(SubmitRequest(target=target, cwd=tmp_path, argv=("clustertrain", "submit"), **more))


def leftovers(tmp_path: Path) -> list[Path]:
    runs = tmp_path / "home" / "runs"
    return list(runs.iterdir()) if runs.exists() else []


def test_run_directory(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    result = submit_run(tmp_path, job={"gpus": 4, "name": "My Run"}, env={"TOKEN": "x"})
    assert (result.job_id, result.backend, result.state) == ("4711", "slurm", "pending")
    run = result.run
    assert run.id.startswith("my-run-") and run.path.parent == tmp_path / "home" / "runs"
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
    spec = load_spec(run)
    assert spec.job.gpus == 4 and spec.job.backend == "slurm" and spec.env == {} and spec.secret_env == ("TOKEN",)
    assert "script" not in tomllib.loads(run.spec.read_text())
    plan = json.loads(run.plan.read_text())
    assert plan["layout"]["strategy"] == "ddp" and plan["world_size"] == 4 and plan["signal_lead_s"] == 120
    (call,) = fake_slurm.calls("sbatch")
    assert call.script == run.job_script.read_text() and f"--chdir={run.path}" in call.argv
    assert stat.S_IMODE(run.job_script.stat().st_mode) == 0o700
    record = json.loads(run.record.read_text())
    assert (record["contract"]["metric"], record["contract"]["resume"]) == ("loss", "elastic")
    assert record["argv"] == ["clustertrain", "submit"] and record["git"] is None and "torch" in record["packages"]
    (event,) = events.for_run(run)
    assert (event["event"], event["job_id"], event["backend"]) == ("submitted", "4711", "slurm")
    assert run.checkpoints.is_dir() and not run.checkpoints.is_symlink() and not run.code.exists()


SECRET = "s3cret-canary"
HOOK = f"https://hooks.example.org/{SECRET}"


def files_with_secret(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file() and SECRET in p.read_text(errors="replace"))


@pytest.mark.parametrize("share", [False, True])
def test_secrets_are_in_one_private_file(share: bool, fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(f'[telemetry.alerts]\nwebhook = "{HOOK}"\n')
    argv = ("clustertrain", "submit", "--env", f"TOKEN={SECRET}", "a.toml")
    request = SubmitRequest(
        target="a.toml", cwd=tmp_path, argv=argv, env={"TOKEN": SECRET, "LANG": "C"}, job={"share": share}
    )
    result = submit(request)
    run = result.run
    assert files_with_secret(run.path) == [run.secrets] and stat.S_IMODE(run.secrets.stat().st_mode) == 0o600
    bash = f'. {run.secrets}; printf \'%s \' "$TOKEN" "$LANG" "$CLUSTERTRAIN_WEBHOOK"'
    output = subprocess.run(["bash", "-c", bash], text=True, capture_output=True, check=True).stdout
    assert output.split() == [SECRET, "C", HOOK]
    (call,) = fake_slurm.calls("sbatch")
    assert SECRET not in " ".join(call.argv) and "TOKEN" in call.script
    spec = load_spec(run)
    assert spec.secret_env == ("LANG", "TOKEN") and spec.recipe.telemetry.alerts.webhook_env == "CLUSTERTRAIN_WEBHOOK"
    assert SECRET not in " ".join(result.notes) and load_settings(run)["env"] == ["LANG", "TOKEN"]
    preview = dry_run(request)
    assert "TOKEN" in preview.script and SECRET not in preview.script


def test_each_sweep_run_has_its_secrets(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    request = SubmitRequest(cwd=tmp_path, env={"TOKEN": SECRET}, job={"share": True})
    result = submit_sweep(request, ["train.seed=1,2"], None)
    assert files_with_secret(tmp_path / "home") == sorted(submitted.run.secrets for submitted, _ in result.runs)


def test_no_secrets_file_without_secrets(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    run = submit_run(tmp_path).run
    assert not run.secrets.exists() and "secrets.sh" not in run.job_script.read_text()


def test_uncopied_files_are_reported(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text("")
    (project / "data").symlink_to("/usr/share")
    for name in (".env", "key.pem", "id_rsa"):
        (project / name).write_text(SECRET)
    result = submit_run(tmp_path, "project/train.py", snapshot_include=("key*",))
    assert [note for note in result.notes if note.startswith("not ")] == [
        "not copied, the job will use the original: data -> /usr/share",
        "not copied: .env, id_rsa (look like secrets); copy with --snapshot-include .env",
    ]
    assert files_with_secret(result.run.path) == [result.run.code / "key.pem"]


def test_file_names_are_escaped_for_terminal(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "\x1b]52;c;x\x07.pem").write_text("")
    (tmp_path / "li\nnk").symlink_to("/usr/share")
    notes = submit_run(tmp_path, "train.py").notes
    assert len([note for note in notes if "pem" in note or "/usr/share" in note]) == 2
    assert all(note.isprintable() for note in notes)


def test_contract_is_in_record(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    contract = {"task": "tell cats from dogs", "metric": "grad_norm", "mode": "max", "target": "benchmark",
             "resume": "exact", "gpu_hours": 5.0}  # fmt: skip
    (tmp_path / "cats.toml").write_text(tomli_w.dumps({"contract": contract}))
    record = json.loads(submit_run(tmp_path, target="cats.toml").run.record.read_text())
    assert record["contract"].items() >= {**contract, "higher_is_better": True}.items()


def test_script_runs_from_snapshot(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / "src").mkdir(parents=True)
    (project / "jobs").mkdir()
    (project / "jobs" / "train.py").write_text("print(1)\n")
    subprocess.run(["git", "init", "-q", project], check=True)
    result = submit_run(tmp_path, "project/jobs/train.py", args=("--steps", "3"))
    script = load_spec(result.run).script
    assert script is not None and script.path == "jobs/train.py" and script.command[-2:] == ("--steps", "3")
    assert script.cwd == str(tmp_path)
    assert (result.run.code / "jobs" / "train.py").read_text() == "print(1)\n"
    # Snapshots omit empty folders, so `src` is not on the path.
    assert f'export PYTHONPATH={result.run.code}"$' in result.run.job_script.read_text()
    (project / "src" / "lib.py").write_text("")
    second = submit_run(tmp_path, "project/jobs/train.py")
    assert f'export PYTHONPATH={second.run.code}:{second.run.code}/src"$' in second.run.job_script.read_text()


@pytest.mark.parametrize(("share", "folder", "file"), [(True, 0o750, 0o040), (False, 0o700, 0)])
def test_umask_does_not_change_permissions(
    fake_slurm: FakeSlurm, tmp_path: Path, share: bool, folder: int, file: int
) -> None:
    project = tmp_path / "project"
    (project / "src").mkdir(parents=True)
    (project / "src" / "train.py").write_text("print(1)\n")
    (project / "src" / "train.py").chmod(0o640)
    (project / "src" / "private.py").write_text("")
    (project / "src" / "private.py").chmod(0o600)
    before = os.umask(0o077)
    try:
        run = submit_run(tmp_path, "project/src/train.py", job={"share": share}).run
        assert os.umask(0o077) == 0o077
    finally:
        os.umask(before)
    paths = [run.path, *run.path.rglob("*")]
    assert {stat.S_IMODE(p.stat().st_mode) for p in paths if p.is_dir()} == {folder}
    files = {p.name: p.stat().st_mode & 0o070 for p in paths if p.is_file()}
    assert files.pop("private.py") == 0  # readable only by its owner
    assert set(files.values()) == {file} and "train.py" in files, files


def write_recipe_with_entry(tmp_path: Path) -> Path:
    """Create a repository with the package ``nets`` next to a recipe that trains one of its models."""
    project = tmp_path / "project"
    (project / "experiments" / "nets").mkdir(parents=True)
    (project / "experiments" / "nets" / "net.py").write_text("def make(): ...\n")
    (project / "experiments" / "net.toml").write_text('[model]\nentry = "nets.net:make"\nargs = { width = 3 }\n')
    subprocess.run(["git", "init", "-q", project], check=True)
    return project


def test_entry_is_imported_from_snapshot(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    write_recipe_with_entry(tmp_path)
    run = submit_run(tmp_path, "project/experiments/net.toml").run
    spec = load_spec(run)
    assert spec.script is None and spec.recipe.model.args == {"width": 3}
    assert (run.code / "experiments" / "nets" / "net.py").read_text() == "def make(): ...\n"
    assert f'export PYTHONPATH={run.code}:{run.code}/experiments"$' in run.job_script.read_text()


def test_entry_in_current_folder_or_installed(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def make(): ...\n")
    run = submit_run(tmp_path, assignments=("model.entry=mine:make",)).run
    assert (run.code / "mine.py").is_file() and f'export PYTHONPATH={run.code}"$' in run.job_script.read_text()
    run = submit_run(tmp_path, assignments=("model.entry=json.decoder:JSONDecoder",)).run
    assert not run.code.exists()


def test_preset_fills_missing_keys(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[model]\nlayers = 2\n")
    model = load_spec(submit_run(tmp_path, "a.toml", assignments=("model.preset=125m",)).run).recipe.model
    assert (model.preset, model.layers, model.dim, model.tie_embeddings) == ("125m", 2, 768, True)


def test_hostile_values_are_inert(fake_slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / HOSTILE).mkdir()
    script = tmp_path / HOSTILE / f"{HOSTILE}.py"
    script.write_text("")
    result = submit_run(tmp_path, str(script), job={"name": HOSTILE}, env={"V": HOSTILE}, args=(HOSTILE,))
    saved = load_spec(result.run)
    assert saved.script is not None and saved.script.command[-1] == HOSTILE and saved.script.path == script.name
    assert saved.secret_env == ("V",) and saved.job.name == HOSTILE
    assert result.run.id.startswith("a-b-touch-pwned-x-j-")
    subprocess.run(["bash", "-n", result.run.job_script], check=True)
    assert not (tmp_path / "pwned").exists()


def test_refusal_leaves_nothing(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    fake_slurm.answers("sbatch", stderr="sbatch: error: invalid partition specified: nope\n", rc=1)
    with pytest.raises(SchedulerError, match="invalid partition specified: nope"):
        submit_run(tmp_path, job={"partition": "nope", "checkpoint_dir": str(tmp_path / "big")})
    assert leftovers(tmp_path) == [] and list((tmp_path / "big").iterdir()) == []


def failing_requests(tmp_path: Path) -> list[dict[str, Any]]:
    (tmp_path / "big.py").write_text("x" * (2 * 1024 * 1024))
    return [
        {"target": "missing.py"},
        {"target": "big.py", "snapshot_limit_mib": 1},
        {"job": {"nodes": 3, "gpus": 7}, "assignments": ("train.global_batch=16",)},
        {"job": {"sbatch": {"wrap": "id"}}},
        {"job": {"account": "a\nb"}},
        {"job": {"gpu_type": "t4"}, "assignments": ("model.dim=8192", "model.heads=64", "model.layers=12")},
        {"job": {"checkpoint_dir": "/proc/nope"}},
    ]


def test_other_failures_leave_nothing(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    for request in failing_requests(tmp_path):
        with pytest.raises(ClusterTrainError):
            submit_run(tmp_path, **request)
        assert leftovers(tmp_path) == [], request
        assert fake_slurm.calls("sbatch") == [], request


def test_failure_while_writing_leaves_nothing(
    fake_slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(transaction.provenance, "collect", interrupt)
    with pytest.raises(KeyboardInterrupt):
        submit_run(tmp_path)
    assert leftovers(tmp_path) == []


def test_model_that_does_not_fit_is_refused_with_numbers(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    large = ("model.dim=8192", "model.heads=64", "model.layers=64")
    with pytest.raises(ConfigError, match=r"needs \d+\.\d GiB per rank .*, but has 15") as e:
        submit_run(tmp_path, job={"gpu_type": "t4"}, assignments=large)
    assert e.value.exit_code == 78 and re.search(r"\d+ nodes of 1 t4", e.value.fix or "")


def test_checkpoint_dir_outside_run(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    result = submit_run(tmp_path, job={"checkpoint_dir": "big"})
    assert result.run.checkpoints.readlink() == tmp_path / "big" / result.run.id
    assert (tmp_path / "big" / result.run.id).is_dir()


def test_share_opens_run_to_group(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    run = submit_run(tmp_path, job={"share": True}).run
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o750
    assert stat.S_IMODE(run.spec.stat().st_mode) == 0o640 and stat.S_IMODE(run.checkpoints.stat().st_mode) == 0o750


def test_dry_run_creates_nothing_and_matches_submit(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    write_recipe_with_entry(tmp_path)
    for target in ("", "train.py", "project/experiments/net.toml"):
        request = SubmitRequest(target=target, cwd=tmp_path, job={"gpus": 2, "time": "30"})
        text = dry_run(request).script
        assert not (tmp_path / "home").exists() and fake_slurm.calls("sbatch") == []
        result = submit(request)
        assert text.replace("xxxxxx", result.run.id.rpartition("-")[2]) == result.run.job_script.read_text()
        subprocess.run(["rm", "-r", tmp_path / "home"], check=True)
        (fake_slurm.folder / "sbatch.calls").unlink()


def test_memory_filesystem_is_refused_on_slurm(
    fake_slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm here")
    monkeypatch.setattr(filesystem, "_MOUNTINFO", Path("/proc/self/mountinfo"))
    monkeypatch.setenv("CLUSTERTRAIN_HOME", "/dev/shm/clustertrain-test")
    with pytest.raises(ConfigError, match=r"/dev/shm/clustertrain-test is on \w+fs, which compute nodes do not see"):
        submit_run(tmp_path)
    assert not Path("/dev/shm/clustertrain-test").exists()


@pytest.mark.parametrize(("home", "backends"), [("a%jb", ["slurm"]), ("a\\b", ["slurm"]), ("a:b", ["slurm", "local"])])
def test_home_with_special_characters_is_refused(
    home: str, backends: list[str], fake_slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path / home))
    for backend in backends:
        with pytest.raises(ConfigError, match="which cannot be used"):
            submit_run(tmp_path, job={"backend": backend, "device": "cpu"})
    assert not (tmp_path / home).exists()


def test_external_folders_are_noted(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    (tmp_path / "datasets").mkdir()
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "train.py").write_text("")
    (tmp_path / "project" / "data").symlink_to(tmp_path / "datasets")
    result = submit_run(tmp_path, "project/train.py")
    assert any(f"data -> {tmp_path / 'datasets'}" in note for note in result.notes)


@pytest.mark.parametrize(("nodes", "noted"), [(1, False), (1000, True)])
def test_many_nodes_on_local_backend_are_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: int, noted: bool
) -> None:
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path / "home"))
    preview = dry_run(SubmitRequest(cwd=tmp_path, job={"backend": "local", "nodes": nodes}))
    assert any("1000 nodes, 1000 ranks on" in note for note in preview.notes) == noted


def test_usage_error_comes_first(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        submit_run(tmp_path, "missing.py")
    assert not (tmp_path / "home").exists()
