"""The snapshot of the user's code."""

from __future__ import annotations

import dataclasses
import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from clustertrain.errors import ConfigError
from clustertrain.submit import transaction
from clustertrain.submit.snapshot import code_snapshot
from clustertrain.submit.snapshot.code_snapshot import CodeSnapshot


def git(folder: Path, *argv: str) -> None:
    options = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "protocol.file.allow=always")
    subprocess.run(["git", *options, "-C", folder, *argv], check=True, capture_output=True)


def write(path: Path, text: str = "x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    write(root / "scripts" / "train.py", "print('train')")
    write(root / "src" / "lib.py")
    write(root / ".gitignore", "*.bin\ndata/\n")
    git(tmp_path, "init", "-q", "project")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "first")
    return root


def take(
    script: Path, tmp_path: Path, limit_mib: int = 100, excluded: Path | None = None, include: tuple[str, ...] = ()
) -> tuple[CodeSnapshot, list[str]]:
    target = tmp_path / "run" / "code"
    target.parent.mkdir(exist_ok=True)
    snapshot = code_snapshot.take_snapshot(script, target, limit_mib=limit_mib, exclude=excluded, include=include)
    assert [p.name for p in target.parent.iterdir()] == ["code"]  # no temporary folder is left
    names = [str(Path(folder, n).relative_to(target)) for folder, sub, files in os.walk(target) for n in files]
    links = [
        str(Path(f, n).relative_to(target)) for f, sub, _ in os.walk(target) for n in sub if Path(f, n).is_symlink()
    ]
    return snapshot, sorted(names + links)


def test_tracked_and_new_files_are_copied_ignored_are_linked(repository: Path, tmp_path: Path) -> None:
    write(repository / "new file.py")
    write(repository / "weights.bin")
    write(repository / "data" / "x.txt")
    write(repository / ".gitignore", "*.bin\n*.pyc\ndata/\nenv/\n__pycache__/\n")
    for ignored in ("src/lib.pyc", "src/__pycache__/lib.pyc", "env/pyvenv.cfg", "env/bin/python"):
        write(repository / ignored)
    snapshot, names = take(repository / "scripts" / "train.py", tmp_path)
    assert snapshot.script == "scripts/train.py" and snapshot.root == repository
    assert names == [".gitignore", "data", "new file.py", "scripts/train.py", "src/lib.py", "weights.bin"]
    code = tmp_path / "run" / "code"
    assert (code / "scripts" / "train.py").read_text() == "print('train')"
    assert (code / "data").readlink() == repository / "data" and (code / "weights.bin").is_symlink()


def test_working_tree_is_copied_not_commit(repository: Path, tmp_path: Path) -> None:
    write(repository / "scripts" / "train.py", "edited")
    (repository / "src" / "lib.py").unlink()  # tracked, but gone
    _, names = take(repository / "scripts" / "train.py", tmp_path)
    assert "src/lib.py" not in names
    assert (tmp_path / "run" / "code" / "scripts" / "train.py").read_text() == "edited"


def test_ignored_script_is_copied(repository: Path, tmp_path: Path) -> None:
    script = write(repository / "data" / "train.py")
    snapshot, names = take(script, tmp_path)
    assert snapshot.script == "data/train.py" and "data/train.py" in names


def test_file_modes_are_kept(repository: Path, tmp_path: Path) -> None:
    (repository / "scripts" / "train.py").chmod(0o755)
    take(repository / "scripts" / "train.py", tmp_path)
    assert os.access(tmp_path / "run" / "code" / "scripts" / "train.py", os.X_OK)
    assert not os.access(tmp_path / "run" / "code" / "src" / "lib.py", os.X_OK)


@pytest.mark.parametrize("name", ["a b.py", "it's.py", "$(touch x).py", "ü.py", "new\nline.py", "-rf", "%j.py"])
def test_hostile_names(name: str, repository: Path, tmp_path: Path) -> None:
    write(repository / name)
    snapshot, names = take(repository / name, tmp_path)
    assert name in names and snapshot.script == name


def test_links_inside_tree_stay_links(repository: Path, tmp_path: Path) -> None:
    (repository / "scripts" / "relative.py").symlink_to("../src/lib.py")
    (repository / "absolute.py").symlink_to(repository / "src" / "lib.py")
    (repository / "folder").symlink_to("src")
    take(repository / "scripts" / "train.py", tmp_path)
    code = tmp_path / "run" / "code"
    assert str((code / "scripts" / "relative.py").readlink()) == "../src/lib.py"
    assert str((code / "absolute.py").readlink()) == "src/lib.py"
    assert str((code / "folder").readlink()) == "src"
    assert (code / "scripts" / "relative.py").read_text() == "x"


def test_links_to_ignored_files_become_copies(repository: Path, tmp_path: Path) -> None:
    (repository / "ignored.py").symlink_to(write(repository / "model.bin", "ignored").name)
    take(repository / "scripts" / "train.py", tmp_path)
    copy = tmp_path / "run" / "code" / "ignored.py"
    assert not copy.is_symlink() and copy.read_text() == "ignored"


def test_links_to_external_files_stay_links_and_are_reported(repository: Path, tmp_path: Path) -> None:
    outside = write(tmp_path / "elsewhere" / "settings.toml", "a = 1")
    (repository / "settings.toml").symlink_to("../elsewhere/settings.toml")
    (repository / "config").symlink_to(".git/config")
    snapshot, _ = take(repository / "scripts" / "train.py", tmp_path)
    link = tmp_path / "run" / "code" / "settings.toml"
    assert str(link.readlink()) == str(outside) and link.read_text() == "a = 1"
    assert snapshot.external_links == (
        f"config -> {repository / '.git' / 'config'}",
        f"settings.toml -> {outside}",
    )


def test_tracked_folder_replaced_by_link(repository: Path, tmp_path: Path) -> None:
    write(tmp_path / "elsewhere" / "lib.py", "outside of the repository")
    shutil.rmtree(repository / "src")
    (repository / "src").symlink_to("../elsewhere")
    snapshot, names = take(repository / "scripts" / "train.py", tmp_path)
    assert "src" in names and str((tmp_path / "run" / "code" / "src").readlink()) == str(tmp_path / "elsewhere")
    assert snapshot.external_links == (f"src -> {tmp_path / 'elsewhere'}",)


SECRET_NAMES = (".env", ".env.local", "conf/.env", "deploy.pem", "id_rsa", ".netrc", ".aws/credentials",
                ".docker/config.json", "credentials-prod.json", ".ssh/config")  # fmt: skip


def test_secrets_are_skipped_and_reported(repository: Path, tmp_path: Path) -> None:
    for name in SECRET_NAMES:
        write(repository / name, "s3cret")
    (repository / "settings").symlink_to(".env")
    write(repository / ".env.example")
    write(repository / "id_rsa_tools.py")
    git(repository, "add", "-A")  # tracked or not
    snapshot, names = take(repository / "scripts" / "train.py", tmp_path)
    assert set(snapshot.skipped_secrets) == {*SECRET_NAMES, "settings"} and not set(snapshot.skipped_secrets) & set(
        names
    )
    assert {".env.example", "id_rsa_tools.py"} <= set(names)
    assert snapshot.files == len(names)


def test_link_to_ignored_secret_is_not_followed(repository: Path, tmp_path: Path) -> None:
    write(repository / "data" / ".env", "s3cret")
    (repository / "settings").symlink_to("data/.env")
    snapshot, names = take(repository / "scripts" / "train.py", tmp_path)
    assert snapshot.skipped_secrets == ("settings",) and "settings" not in names


def test_included_secret_is_copied(repository: Path, tmp_path: Path) -> None:
    write(repository / ".env")
    write(repository / "certificates" / "ca.pem")
    write(repository / "key.pem")
    snapshot, names = take(repository / "scripts" / "train.py", tmp_path, include=(".env", "certificates/*"))
    assert {".env", "certificates/ca.pem"} <= set(names) and snapshot.skipped_secrets == ("key.pem",)


@pytest.mark.parametrize("pattern", ["", "[", "certificate/*", ".env"])
def test_include_pattern_without_match_is_refused(repository: Path, tmp_path: Path, pattern: str) -> None:
    write(repository / ".gitignore", ".env\n")
    write(repository / ".env")
    write(repository / "certificates" / "ca.pem")
    with pytest.raises(ConfigError, match=r"--snapshot-include .*: no file in .* matches") as e:
        take(repository / "scripts" / "train.py", tmp_path, include=("certificates/*", pattern))
    assert "git ignores" in str(e.value.fix)


def test_secrets_are_skipped_without_git(tmp_path: Path) -> None:
    script = write(tmp_path / "plain" / "train.py")
    write(tmp_path / "plain" / ".env")
    snapshot, names = take(script, tmp_path)
    assert snapshot.skipped_secrets == (".env",) and names == ["train.py"]


@pytest.mark.parametrize("group", [0o000, 0o050])
def test_group_access_never_exceeds_file_mode(group: int, repository: Path, tmp_path: Path) -> None:
    modes = {"src/lib.py": 0o6755, "private.py": 0o600, "tool": 0o700, "open.py": 0o666}
    for name, mode in modes.items():
        write(repository / name).chmod(mode)
    take(repository / "scripts" / "train.py", tmp_path)
    code = tmp_path / "run" / "code"
    code_snapshot.grant_group_access(code, group)
    shared = {"src/lib.py": 0o750, "private.py": 0o600, "tool": 0o700, "open.py": 0o640}
    private = {"src/lib.py": 0o700, "private.py": 0o600, "tool": 0o700, "open.py": 0o600}
    assert {name: stat.S_IMODE((code / name).stat().st_mode) for name in modes} == (shared if group else private)


def test_external_worktree_is_not_copied(repository: Path, tmp_path: Path) -> None:
    write(tmp_path / "private.txt")
    git(repository, "config", "core.worktree", str(tmp_path))
    snapshot, names = take(repository / "scripts" / "train.py", tmp_path)
    assert snapshot.root == repository / "scripts" and names == ["train.py"]


def test_broken_git_config_is_reported(repository: Path, tmp_path: Path) -> None:
    with (repository / ".git" / "config").open("a") as f:
        f.write("[broken")
    with pytest.raises(ConfigError, match="bad config line"):
        take(repository / "scripts" / "train.py", tmp_path)


def test_links_to_external_folders_are_reported(repository: Path, tmp_path: Path) -> None:
    write(tmp_path / "datasets" / "big.txt", "data")
    (repository / "datasets").symlink_to("../datasets")
    snapshot, _ = take(repository / "scripts" / "train.py", tmp_path)
    link = tmp_path / "run" / "code" / "datasets"
    assert str(link.readlink()) == str(tmp_path / "datasets") and (link / "big.txt").read_text() == "data"
    assert snapshot.external_links == (f"datasets -> {tmp_path / 'datasets'}",)


def test_dangling_and_circular_links_are_kept(repository: Path, tmp_path: Path) -> None:
    (repository / "dangling").symlink_to("nowhere")
    (repository / "circular").symlink_to("circular")
    _, names = take(repository / "scripts" / "train.py", tmp_path)
    assert {"dangling", "circular"} <= set(names)


def test_linked_script_keeps_its_place(repository: Path, tmp_path: Path) -> None:
    real = write(tmp_path / "elsewhere" / "real.py", "real")
    (repository / "linked.py").symlink_to(real)
    snapshot, _ = take(repository / "linked.py", tmp_path)
    assert snapshot.script == "linked.py" and (tmp_path / "run" / "code" / "linked.py").read_text() == "real"
    assert snapshot.script_source == str(real) and not (tmp_path / "run" / "code" / "linked.py").is_symlink()


def test_submodules_and_nested_repositories_are_copied(repository: Path, tmp_path: Path) -> None:
    library = tmp_path / "library"
    write(library / "module.py")
    git(tmp_path, "init", "-q", "library")
    git(library, "add", "-A")
    git(library, "commit", "-q", "-m", "first")
    git(repository, "submodule", "add", "-q", str(library), "third party/library")
    git(repository / "scripts", "init", "-q", "nested")
    write(repository / "scripts" / "nested" / "inner.py")
    _, names = take(repository / "scripts" / "train.py", tmp_path)
    assert "third party/library/module.py" in names and "scripts/nested/inner.py" in names


def test_submodule_that_is_not_checked_out_is_skipped(repository: Path, tmp_path: Path) -> None:
    git(repository, "update-index", "--add", "--cacheinfo", f"160000,{'1' * 40},missing")
    (repository / "missing").mkdir()
    _, names = take(repository / "scripts" / "train.py", tmp_path)
    assert not any(name.startswith("missing") for name in names)


def test_caches_and_venvs_are_skipped_without_git(tmp_path: Path) -> None:
    root = tmp_path / "plain"
    script = write(root / "train.py")
    write(root / "package" / "module.py")
    for name in ("__pycache__/a.pyc", ".venv/lib/x.py", "venv/x.py", "node_modules/x.js", "module.pyc", ".git/config"):
        write(root / name)
    write(root / "my-env" / "pyvenv.cfg")
    write(root / "my-env" / "lib.py")
    os.mkfifo(root / "pipe")
    snapshot, names = take(script, tmp_path)
    assert names == ["package/module.py", "train.py"] and snapshot.root == root


def test_size_limit_names_largest_files_and_leaves_nothing(repository: Path, tmp_path: Path) -> None:
    write(repository / "weights.pt", "w" * (2 * 1024 * 1024))
    write(repository / "small.txt", "s" * 1024)
    with pytest.raises(ConfigError) as e:
        take(repository / "scripts" / "train.py", tmp_path, limit_mib=1)
    assert "2.0 MiB  weights.pt" in str(e.value) and ".gitignore" in str(e.value)
    assert list((tmp_path / "run").iterdir()) == []
    take(repository / "scripts" / "train.py", tmp_path, limit_mib=3)


def test_fix_outside_git_says_that_gitignore_needs_git_and_works(tmp_path: Path) -> None:
    script = write(tmp_path / "plain" / "train.py")
    write(tmp_path / "plain" / "ckpt" / "step-50.pt", "w" * (2 * 1024 * 1024))
    with pytest.raises(ConfigError) as e:
        take(script, tmp_path, limit_mib=1)
    assert e.value.fix is not None and "`git init`" in e.value.fix
    git(tmp_path / "plain", "init", "-q")
    write(tmp_path / "plain" / ".gitignore", "ckpt/\n")
    assert take(script, tmp_path, limit_mib=1)[0].largest_file in (".gitignore", "train.py")


def test_large_copy_outside_git_is_noted(tmp_path: Path) -> None:
    script = write(tmp_path / "plain" / "train.py")
    write(tmp_path / "plain" / "ckpt" / "step-50.pt", "w" * (2 * 1024 * 1024))
    snapshot, _ = take(script, tmp_path)
    assert transaction.snapshot_notes(snapshot) == []
    (note,) = transaction.snapshot_notes(dataclasses.replace(snapshot, size_bytes=59 * 1024**2))
    assert note.startswith("59.0 MiB copied: ") and note.endswith("including ckpt/step-50.pt")


def test_too_many_files_are_refused(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_snapshot, "MAX_FILES", 2)
    with pytest.raises(ConfigError, match="looks like data"):
        take(repository / "scripts" / "train.py", tmp_path)


def test_runs_folder_is_skipped(repository: Path, tmp_path: Path) -> None:
    write(repository / "home" / "runs" / "old" / "spec.toml")
    _, names = take(repository / "scripts" / "train.py", tmp_path, excluded=repository / "home")
    assert not any(name.startswith("home") for name in names)


def test_failed_copy_leaves_nothing(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "lib.py")

    monkeypatch.setattr("shutil.copyfile", refuse)
    with pytest.raises(ConfigError, match=r"Permission denied.*lib\.py"):
        take(repository / "scripts" / "train.py", tmp_path)
    assert list((tmp_path / "run").iterdir()) == []
