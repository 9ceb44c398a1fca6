"""The snapshot of the user's code."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from clustertrain.errors import ConfigError
from clustertrain.launch import snapshot
from clustertrain.launch.snapshot import Snapshot


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


def take(script: Path, tmp_path: Path, limit_mib: int = 100, without: Path | None = None) -> tuple[Snapshot, list[str]]:
    target = tmp_path / "run" / "code"
    target.parent.mkdir(exist_ok=True)
    made = snapshot.take(script, target, limit_mib=limit_mib, without=without)
    assert [p.name for p in target.parent.iterdir()] == ["code"]  # no scratch folder is left
    names = [str(Path(folder, n).relative_to(target)) for folder, sub, files in os.walk(target) for n in files]
    links = [
        str(Path(f, n).relative_to(target)) for f, sub, _ in os.walk(target) for n in sub if Path(f, n).is_symlink()
    ]
    return made, sorted(names + links)


def test_tracked_and_new_files_are_taken_and_ignored_ones_not(repository: Path, tmp_path: Path) -> None:
    write(repository / "new file.py")
    write(repository / "weights.bin")
    write(repository / "data" / "x.txt")
    made, names = take(repository / "scripts" / "train.py", tmp_path)
    assert made.script == "scripts/train.py" and made.root == repository
    assert names == [".gitignore", "new file.py", "scripts/train.py", "src/lib.py"]
    assert (tmp_path / "run" / "code" / "scripts" / "train.py").read_text() == "print('train')"


def test_the_snapshot_is_of_the_working_tree_not_of_the_commit(repository: Path, tmp_path: Path) -> None:
    write(repository / "scripts" / "train.py", "edited")
    (repository / "src" / "lib.py").unlink()  # tracked, but gone
    _, names = take(repository / "scripts" / "train.py", tmp_path)
    assert "src/lib.py" not in names
    assert (tmp_path / "run" / "code" / "scripts" / "train.py").read_text() == "edited"


def test_an_ignored_script_is_taken_all_the_same(repository: Path, tmp_path: Path) -> None:
    script = write(repository / "data" / "train.py")
    made, names = take(script, tmp_path)
    assert made.script == "data/train.py" and "data/train.py" in names


def test_modes_are_kept(repository: Path, tmp_path: Path) -> None:
    (repository / "scripts" / "train.py").chmod(0o755)
    take(repository / "scripts" / "train.py", tmp_path)
    assert os.access(tmp_path / "run" / "code" / "scripts" / "train.py", os.X_OK)
    assert not os.access(tmp_path / "run" / "code" / "src" / "lib.py", os.X_OK)


@pytest.mark.parametrize("name", ["a b.py", "it's.py", "$(touch x).py", "ü.py", "new\nline.py", "-rf", "%j.py"])
def test_hostile_names(name: str, repository: Path, tmp_path: Path) -> None:
    write(repository / name)
    made, names = take(repository / name, tmp_path)
    assert name in names and made.script == name


def test_links_inside_the_tree_stay_links(repository: Path, tmp_path: Path) -> None:
    (repository / "scripts" / "relative.py").symlink_to("../src/lib.py")
    (repository / "absolute.py").symlink_to(repository / "src" / "lib.py")
    (repository / "folder").symlink_to("src")
    take(repository / "scripts" / "train.py", tmp_path)
    code = tmp_path / "run" / "code"
    assert str((code / "scripts" / "relative.py").readlink()) == "../src/lib.py"
    assert str((code / "absolute.py").readlink()) == "src/lib.py"
    assert str((code / "folder").readlink()) == "src"
    assert (code / "scripts" / "relative.py").read_text() == "x"


def test_links_to_files_elsewhere_become_copies(repository: Path, tmp_path: Path) -> None:
    outside = write(tmp_path / "elsewhere" / "settings.toml", "a = 1")
    (repository / "settings.toml").symlink_to(outside)
    (repository / "ignored.py").symlink_to(write(repository / "model.bin", "ignored").name)
    take(repository / "scripts" / "train.py", tmp_path)
    copy = tmp_path / "run" / "code" / "settings.toml"
    assert not copy.is_symlink() and copy.read_text() == "a = 1"
    assert not (tmp_path / "run" / "code" / "ignored.py").is_symlink()


def test_links_to_folders_elsewhere_stay_where_they_are_and_are_told(repository: Path, tmp_path: Path) -> None:
    write(tmp_path / "datasets" / "big.txt", "data")
    (repository / "datasets").symlink_to("../datasets")
    made, _ = take(repository / "scripts" / "train.py", tmp_path)
    link = tmp_path / "run" / "code" / "datasets"
    assert str(link.readlink()) == str(tmp_path / "datasets") and (link / "big.txt").read_text() == "data"
    assert made.outside == (f"datasets -> {tmp_path / 'datasets'}",)


def test_dangling_and_circular_links_do_no_harm(repository: Path, tmp_path: Path) -> None:
    (repository / "dangling").symlink_to("nowhere")
    (repository / "circular").symlink_to("circular")
    _, names = take(repository / "scripts" / "train.py", tmp_path)
    assert {"dangling", "circular"} <= set(names)


def test_a_script_that_is_a_link_keeps_its_place(repository: Path, tmp_path: Path) -> None:
    real = write(tmp_path / "elsewhere" / "real.py", "real")
    (repository / "linked.py").symlink_to(real)
    made, _ = take(repository / "linked.py", tmp_path)
    assert made.script == "linked.py" and (tmp_path / "run" / "code" / "linked.py").read_text() == "real"


def test_submodules_and_nested_repositories_are_entered(repository: Path, tmp_path: Path) -> None:
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


def test_a_submodule_that_was_never_checked_out_is_left_out(repository: Path, tmp_path: Path) -> None:
    git(repository, "update-index", "--add", "--cacheinfo", f"160000,{'1' * 40},missing")
    (repository / "missing").mkdir()
    _, names = take(repository / "scripts" / "train.py", tmp_path)
    assert not any(name.startswith("missing") for name in names)


def test_without_git_caches_and_environments_are_left_out(tmp_path: Path) -> None:
    root = tmp_path / "plain"
    script = write(root / "train.py")
    write(root / "package" / "module.py")
    for name in ("__pycache__/a.pyc", ".venv/lib/x.py", "venv/x.py", "node_modules/x.js", "module.pyc", ".git/config"):
        write(root / name)
    write(root / "my-env" / "pyvenv.cfg")
    write(root / "my-env" / "lib.py")
    os.mkfifo(root / "pipe")
    made, names = take(script, tmp_path)
    assert names == ["package/module.py", "train.py"] and made.root == root


def test_too_much_names_the_largest_files_and_leaves_nothing(repository: Path, tmp_path: Path) -> None:
    write(repository / "weights.pt", "w" * (2 * 1024 * 1024))
    write(repository / "small.txt", "s" * 1024)
    with pytest.raises(ConfigError) as e:
        take(repository / "scripts" / "train.py", tmp_path, limit_mib=1)
    assert "2.0 MiB  weights.pt" in str(e.value) and ".gitignore" in str(e.value)
    assert list((tmp_path / "run").iterdir()) == []
    take(repository / "scripts" / "train.py", tmp_path, limit_mib=3)


def test_too_many_files_are_data(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "MAX_FILES", 2)
    with pytest.raises(ConfigError, match="looks like data"):
        take(repository / "scripts" / "train.py", tmp_path)


def test_the_runs_themselves_are_left_out(repository: Path, tmp_path: Path) -> None:
    write(repository / "home" / "runs" / "old" / "spec.toml")
    _, names = take(repository / "scripts" / "train.py", tmp_path, without=repository / "home")
    assert not any(name.startswith("home") for name in names)


def test_a_file_that_cannot_be_copied_leaves_nothing(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "lib.py")

    monkeypatch.setattr("shutil.copy2", refuse)
    with pytest.raises(ConfigError, match=r"Permission denied.*lib\.py"):
        take(repository / "scripts" / "train.py", tmp_path)
    assert list((tmp_path / "run").iterdir()) == []
