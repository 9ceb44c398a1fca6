"""Copies behind a URL: whole or not there, made again until they are, and what a run comes back from."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from saved import save

from clustertrain import clock, settings
from clustertrain.checkpoint import manager as manager_module
from clustertrain.checkpoint import manifest as index
from clustertrain.checkpoint import offline, remote, storage
from clustertrain.checkpoint.agree import Ranks
from clustertrain.checkpoint.background import Outcome
from clustertrain.checkpoint.manager import CheckpointManager, Remote
from clustertrain.checkpoint.remote import SAID, Copied, Upload, Uploader, owner
from clustertrain.checkpoint.retention import Policy
from clustertrain.checkpoint.source import RemoteFolder
from clustertrain.checkpoint.storage import StorageError

LONG_S = 60.0


def state_of(value: float) -> dict[str, Any]:
    return {"weights": torch.full((1000,), value), "note": value}


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def steps(root: Path | RemoteFolder) -> list[int | None]:
    return [index.step_of(p) for p in index.folders(root)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "shared"


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """The folder behind the URL."""
    return tmp_path / "store" / "run-1"


@pytest.fixture
def told() -> list[Outcome]:
    return []


@pytest.fixture
def make(
    root: Path, there: Path, told: list[Outcome], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., CheckpointManager]]:
    """A manager whose process meets ``fault``, with what it restored into ``state``."""
    made = []

    def make(*, fault: str = "", keep: int = 2, needed: bool = False, state: Any = None, **more: Any) -> Any:
        options: dict[str, Any] = {"attempt": "1", "layout": {}, "policy": Policy(keep=2), **more}
        url = Remote(f"file://{there}", Policy(keep=keep), needed)
        manager = CheckpointManager(root, Ranks(), remote=url, on_copy=told.append, **options)
        if fault:
            monkeypatch.setenv(settings.FAULT_AT, fault)
        manager.start()
        monkeypatch.delenv(settings.FAULT_AT, raising=False)
        made.append(manager)
        manager.restored = manager.restore(state if state is not None else state_of(0.0))  # type: ignore[attr-defined]
        return manager

    yield make
    for manager in made:
        manager.close()


def copied(manager: CheckpointManager) -> bool:
    until = clock.monotonic() + LONG_S
    return manager.await_copies(lambda: clock.monotonic() < until)


@pytest.mark.parametrize(
    "engine", ["raw", *(pytest.param(name, marks=pytest.mark.ranks) for name in ("dcp", "torchsnapshot"))]
)  # processes that write for the other two import torch
def test_copies_are_the_same_and_a_run_comes_back_from_them(
    make: Callable[..., Any], root: Path, there: Path, told: list[Outcome], engine: str
) -> None:
    manager = make(engine=engine)
    for step in (3, 6):
        manager.save(step, state_of(float(step)), wait=True)
        assert copied(manager)
    assert [(o.step, o.trouble) for o in told] == [(3, None), (6, None)]
    assert [o.bytes for o in told] == [index.read_manifest(p).bytes for p in index.folders(root)]
    assert files(there) == {k: v for k, v in files(root).items() if k != SAID}
    manager.close()
    shutil.rmtree(root)
    state = state_of(0.0)
    second = make(attempt="2", state=state, engine=engine)
    assert str(second.restored.path) == f"file://{there}/step-00000006"
    assert (second.restored.step, state["note"], float(state["weights"].sum())) == (6, 6.0, 6000.0)
    second.save(9, state_of(9.0), wait=True)
    assert copied(second)
    assert steps(there) == [6, 9]


def test_what_is_there_follows_its_own_number(make: Callable[..., Any], root: Path, there: Path) -> None:
    manager = make(keep=1)
    for step in (3, 6, 9):
        manager.save(step, state_of(float(step)), wait=True)
        assert copied(manager)
    assert (steps(root), steps(there)) == ([6, 9], [9])
    offline.verify(offline.find(there))


def test_a_store_that_fails_is_tried_again_and_the_training_goes_on(
    make: Callable[..., Any], root: Path, there: Path, told: list[Outcome]
) -> None:
    there.parent.write_text("in the way")
    manager = make()
    manager.save(3, state_of(3.0), wait=True)
    assert clock.wait_until(lambda: (manager.poll(), bool(told))[1], LONG_S)
    assert "again in 1 s" in told[0].trouble.why  # type: ignore[union-attr]
    manager.save(6, state_of(6.0), wait=True)
    there.parent.unlink()
    assert copied(manager)
    assert steps(there) == [3, 6]
    assert [o.step for o in told if o.trouble is None] == [6, 3]  # the newest first
    for folder in index.folders(there):
        offline.verify(folder)


@pytest.mark.parametrize("point", ["while uploading", "before the remote marker"])
def test_a_kill_leaves_nothing_that_counts_and_the_next_attempt_goes_on(
    make: Callable[..., Any], root: Path, there: Path, point: str
) -> None:
    manager = make(fault=f"{point}:0:1:KILL")
    manager.save(3, state_of(3.0), wait=True)
    assert clock.wait_until(lambda: (manager.poll(), not manager._worker.alive)[1], LONG_S)
    assert [p for p in index.folders(there) if index.is_committed(p)] == []
    manager.close()
    second = make(attempt="2")
    assert second.restored.path == root / "step-00000003"
    assert copied(second)  # without a save
    assert files(there / "step-00000003") == files(root / "step-00000003")


def test_another_writer_copies_what_a_killed_one_did_not(make: Callable[..., Any], root: Path, there: Path) -> None:
    manager = make(fault="while uploading:0:1:KILL")
    manager.save(3, state_of(3.0), wait=True)
    assert copied(manager)
    assert files(there / "step-00000003") == files(root / "step-00000003")


def test_the_end_of_the_run_waits_no_longer_than_it_is_asked_to(
    make: Callable[..., Any], there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there.parent.write_text("in the way")
    manager = make()
    manager.save(3, state_of(3.0), wait=True)
    assert not manager.await_copies(lambda: False)  # told to stop
    monkeypatch.setattr(manager_module, "FAILING_S", 0.5)
    assert not manager.await_copies(lambda: True)
    process = manager._worker._process
    manager.close()
    assert process.returncode == 0


def test_without_a_url_nothing_of_fsspec_is_imported() -> None:
    code = "import sys, clustertrain.checkpoint.writing; sys.exit('fsspec' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# -- what is restored


def _flip(path: Path, at: int = 20) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "restored", "skipped"),
    [
        ("", "shared/step-00000006", []),
        ("shared/step-00000006/rank-0.bin", "run-1/step-00000006", [6]),
        ("shared/step-00000006", "run-1/step-00000006", []),
        ("run-1/step-00000006/rank-0.bin shared/step-00000006", "shared/step-00000003", [6]),
        ("run-1/step-00000006/COMMITTED shared/step-00000006", "shared/step-00000003", []),
    ],
)
def test_the_newest_that_verifies_is_restored_wherever_it_is(
    make: Callable[..., Any], root: Path, there: Path, damage: str, restored: str, skipped: list[int]
) -> None:
    for step in (3, 6):
        save(root, step, state_of(float(step)))
    shutil.copytree(root, there)
    for name in damage.split():
        path = (there.parent if name.startswith("run") else root.parent) / name
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name == "COMMITTED":
            path.unlink()
        else:
            _flip(path)
    manager = make(attempt="2", keep=9)
    assert str(manager.restored.path).endswith(restored)
    assert [s["step"] for s in manager.restored.skipped] == skipped
    assert copied(manager)
    # What was damaged behind the URL is replaced when the shared folder has the step.
    manager.save(6, state_of(6.0), wait=True)
    markers = [folder / "step-00000006" / index.COMMITTED for folder in (root, there)]
    assert clock.wait_until(lambda: markers[1].exists() and markers[1].read_bytes() == markers[0].read_bytes(), LONG_S)
    for folder in (*index.folders(root), *index.folders(there)):
        offline.verify(folder)


def test_a_store_that_cannot_be_asked_matters_only_where_it_may_have_what_is_missing(
    make: Callable[..., Any], root: Path, there: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(storage, "PATIENCE_S", 0.0)

    def fail(self: RemoteFolder) -> Any:
        raise PermissionError(13, "access denied")

    monkeypatch.setattr(RemoteFolder, "iterdir", fail)
    with pytest.raises(StorageError, match=r"the checkpoints cannot be listed.*run-1: access denied"):
        make(needed=True)
    assert make().restored is None
    save(root, 3, state_of(3.0))
    assert make(needed=True).restored.step == 3
    assert [r.message.endswith("access denied; not looked at for newer checkpoints") for r in caplog.records] == [
        True
    ] * 2


# -- several ranks


class Store:
    """Uploaders of several ranks, in this process, on a store in memory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = f"memory://{root}/run-1"
        self.told: list[tuple[int, Copied]] = []
        self.uploaders: list[Uploader] = []

    def start(
        self, ranks: int, *, attempt: str = "1", policy: Policy | None = None, missing: int | None = None
    ) -> list[Uploader]:
        def tell(rank: int) -> Callable[[Copied], None]:
            return lambda c: self.told.append((rank, c))

        self.stop()
        policy = policy or Policy(keep=9)
        for rank in range(ranks):
            job = Upload(url=self.url, root=str(self.root), rank=rank, world_size=ranks, attempt=attempt, policy=policy)
            self.uploaders.append(Uploader(job, tell(rank), lambda: None))
            if rank != missing:
                self.uploaders[-1].begin()
        return self.uploaders

    def stop(self) -> None:
        for uploader in self.uploaders:
            uploader.end()
        self.uploaders = []

    def wait_for(self, step: int, ranks: int) -> None:
        def idle() -> bool:
            return {r for r, c in self.told if c.trouble is None and not c.bytes and c.step >= step} >= set(
                range(ranks)
            )

        assert clock.wait_until(idle, LONG_S, 0.02), self.told


@pytest.fixture
def store(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr(remote, "PAUSES_S", (0.05, 0.2))
    monkeypatch.setattr(remote, "POLLS_S", (0.01, 0.05))
    made = Store(root)
    yield made
    made.stop()


def many_files(root: Path, step: int, ranks: int) -> Path:
    """A checkpoint with the files of so many ranks, and one more."""
    folder = save(root, step, state_of(float(step)))
    extra = {f"rank-{r}.bin": bytes([r]) * 10 for r in range(1, ranks)} | {".metadata": b"m"}
    for name, data in extra.items():
        (folder / name).write_bytes(data)
    manifest = index.read_manifest(folder)
    sizes = {**manifest.files, **{n: len(d) for n, d in extra.items()}}
    index.write_manifest(folder, msgspec.structs.replace(manifest, files=sizes, world_size=ranks))
    return folder


def of_store(store: Store) -> dict[str, bytes]:
    folder = RemoteFolder(store.url)
    return {name: (folder / name).read_bytes() for name in folder.sizes()}


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_every_rank_copies_its_share_whoever_wrote_it(store: Store, root: Path, ranks: int) -> None:
    many_files(root, 3, 4)
    store.start(ranks)
    store.wait_for(3, ranks)
    assert of_store(store) == {k: v for k, v in files(root).items() if k != SAID}
    many_files(root, 6, 4)
    for uploader in store.uploaders:
        uploader.saved(6)
    store.wait_for(6, ranks)
    assert steps(RemoteFolder(store.url)) == [3, 6]
    assert [(r, c.step) for r, c in store.told if c.bytes] == [(0, 3), (0, 6)]


@pytest.mark.parametrize(
    ("name", "rank"),
    [("rank-12.bin", 12), ("__3_0.distcp", 3), ("rank-4/segment-7", 4), (".metadata", 0), ("manifest.json", 0)],
)
def test_files_belong_to_the_rank_in_their_name(name: str, rank: int) -> None:
    assert owner(name) == rank


def test_without_all_shares_nothing_is_committed_and_the_rest_comes_later(store: Store, root: Path) -> None:
    many_files(root, 3, 2)
    store.start(2, missing=1)
    there = RemoteFolder(store.url) / "step-00000003"
    assert clock.wait_until(lambda: ".uploaded-0" in there.sizes(), LONG_S, 0.02)
    assert not index.is_committed(there)
    # The next attempt has another number of ranks, for which the share that is there is no share.
    store.start(1, attempt="2")
    store.wait_for(3, 1)
    assert of_store(store) == {k: v for k, v in files(root).items() if k != SAID}


def test_a_step_that_was_saved_anew_replaces_the_copy_as_a_whole(
    store: Store, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many_files(root, 3, 2)
    store.start(2)
    store.wait_for(3, 2)
    there = RemoteFolder(store.url) / "step-00000003"
    old = of_store(store)
    shutil.rmtree(root / "step-00000003")
    save(root, 3, state_of(30.0))
    seen: list[bool] = []
    original = Uploader._put

    def put(self: Uploader, *args: Any) -> None:
        seen.append(index.is_committed(there))
        original(self, *args)

    monkeypatch.setattr(Uploader, "_put", put)
    store.told.clear()
    store.start(2, attempt="2")
    store.wait_for(3, 2)
    assert seen and not any(seen)  # while half of it was replaced it did not count
    assert of_store(store) != old
    offline.verify(there)


def test_what_is_being_copied_is_not_deleted_here(store: Store, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, go = threading.Event(), threading.Event()
    original = Uploader._put

    def put(self: Uploader, *args: Any) -> None:
        held.set()
        assert go.wait(LONG_S)
        original(self, *args)

    monkeypatch.setattr(Uploader, "_put", put)
    save(root, 3, state_of(3.0))
    (uploader,) = store.start(1)
    assert held.wait(LONG_S)
    assert uploader.spared() == (3,)
    go.set()
    store.wait_for(3, 1)
    assert uploader.spared() == ()


def test_what_was_deleted_here_is_not_waited_for(store: Store, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Uploader._put

    def put(self: Uploader, path: Path, there: Any) -> None:
        shutil.rmtree(path.parent, ignore_errors=True)
        original(self, path, there)

    monkeypatch.setattr(Uploader, "_put", put)
    save(root, 3, state_of(3.0))
    store.start(1)
    store.wait_for(0, 1)
    assert [c.trouble is not None for _, c in store.told] == [True, False]
    assert [p for p in index.folders(RemoteFolder(store.url)) if index.is_committed(p)] == []


@pytest.mark.parametrize("name", ["rank-0.bin", "manifest.json"])
def test_what_is_damaged_here_is_not_copied(store: Store, root: Path, name: str) -> None:
    for step in (3, 6):
        save(root, step, state_of(float(step)))
    os.truncate(root / "step-00000006" / name, 5)
    store.start(1)
    store.wait_for(3, 1)
    there = RemoteFolder(store.url)
    assert [index.step_of(p) for p in index.folders(there) if index.is_committed(p)] == [3]
    assert [(c.step, name in c.trouble.why) for _, c in store.told if c.trouble] == [(6, True)]


def test_the_policy_there_is_that_of_here(store: Store, root: Path) -> None:
    policy = Policy(keep=1, keep_every=100)
    for step in (50, 100, 150, 200, 250):
        save(root, step, state_of(float(step)))
    store.start(1, policy=policy)
    store.wait_for(250, 1)
    there = RemoteFolder(store.url)
    assert steps(there) == [100, 200, 250]
    assert [c.step for _, c in store.told if c.bytes] == [250, 200, 100]
    for step in (50, 100, 150, 200, 250):  # here they may go meanwhile
        shutil.rmtree(root / f"step-{step:08d}")
    save(root, 260, state_of(260.0))
    (there / "step-00000240" / "rank-0.bin").write_bytes(b"of an attempt that was killed")
    store.uploaders[0].saved(260)
    store.wait_for(260, 1)
    assert steps(there) == [100, 200, 260]


def test_somebody_elses_change_there_is_noticed_and_mended(
    store: Store, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many_files(root, 3, 2)
    original, once = Uploader._commit, [True]

    def commit(self: Uploader, step: int, *args: Any) -> None:
        if once and clock.wait_until(lambda: ".uploaded-1" in there.sizes(), LONG_S, 0.02):
            once.pop()
            (there / "rank-1.bin").write_bytes(b"x")
        original(self, step, *args)

    there = RemoteFolder(store.url) / "step-00000003"
    monkeypatch.setattr(Uploader, "_commit", commit)
    store.start(2)
    store.wait_for(3, 2)
    assert any("is not what was written there" in c.trouble.why for _, c in store.told if c.trouble)
    assert of_store(store) == {k: v for k, v in files(root).items() if k != SAID}


def test_shares_that_do_not_come_are_told(store: Store, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PATIENCE_S", 0.1)
    many_files(root, 3, 2)
    store.start(2, missing=1)
    assert clock.wait_until(lambda: any(c.trouble for _, c in store.told), LONG_S, 0.02)
    assert "the files of rank 1 have not come for 0.1 s" in store.told[0][1].trouble.why  # type: ignore[union-attr]


def test_what_rank_0_says_in_another_attempt_is_not_heard(store: Store, root: Path) -> None:
    many_files(root, 3, 2)
    (root / SAID).write_text(json.dumps({"attempt": "1", "nth": 1, "upto": 0, "step": 3, "marker": "x"}))
    job = Upload(url=store.url, root=str(root), rank=1, world_size=2, attempt="2", policy=Policy())
    uploader = Uploader(job, lambda c: None, lambda: None)
    assert uploader._hear() is None
    (root / SAID).write_text("{")
    assert uploader._hear() is None


def test_when_rank_0_is_gone_nobody_waits_for_it(store: Store, root: Path) -> None:
    root.mkdir()
    first, second = store.start(2)
    store.wait_for(0, 1)
    first.end()
    second.saved(3)
    first.say_over()
    assert clock.wait_until(lambda: any(r == 1 and c.step >= 3 for r, c in store.told), LONG_S, 0.02)


def test_a_copy_gives_way_to_a_save_and_ends_when_nobody_waits(
    store: Store, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "CHUNK_BYTES", 1000)
    asked: list[int] = []
    job = Upload(url=store.url, root=str(root), rank=0, world_size=1, attempt="1", policy=Policy())

    def save_is_over() -> None:
        asked.append(1)
        if len(asked) == 3:
            uploader.end()

    uploader = Uploader(job, lambda c: None, save_is_over)
    save(root, 3, state_of(3.0))
    thread = threading.Thread(target=uploader._run)
    thread.start()
    thread.join(LONG_S)
    assert not thread.is_alive() and len(asked) == 3
    assert not index.is_committed(RemoteFolder(store.url) / "step-00000003")
