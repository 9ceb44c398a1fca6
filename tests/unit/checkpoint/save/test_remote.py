"""The uploaders of several ranks writing to one store."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from clustertrain import clock
from clustertrain.checkpoint.core.retention import RetentionPolicy
from clustertrain.checkpoint.format import manifest as index
from clustertrain.checkpoint.format.storage import RemoteFolder
from clustertrain.checkpoint.offline import inspect
from clustertrain.checkpoint.save import remote
from clustertrain.checkpoint.save.remote import ANNOUNCEMENT_FILE, Uploader, owner_rank
from clustertrain.checkpoint.save.writer_jobs import JobOutcome, UploadJob
from tests.unit.checkpoint.saved import files, save, state_of, steps

LONG_S = 60.0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "shared"


class Store:
    """Uploaders of several ranks in this process, and their store in memory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = f"memory://{root}/run-1"
        self.outcomes: list[tuple[int, JobOutcome]] = []
        self.uploaders: list[Uploader] = []

    def start(
        self, ranks: int, *, attempt: str = "1", policy: RetentionPolicy | None = None, missing: int | None = None
    ) -> list[Uploader]:
        def append_for(rank: int) -> Callable[[JobOutcome], None]:
            return lambda c: self.outcomes.append((rank, c))

        self.stop()
        policy = policy or RetentionPolicy(keep=9)
        for rank in range(ranks):
            job = UploadJob(
                url=self.url, root=str(self.root), rank=rank, world_size=ranks, attempt=attempt, policy=policy
            )
            self.uploaders.append(Uploader(job, append_for(rank), lambda: None))
            if rank != missing:
                self.uploaders[-1].start()
        return self.uploaders

    def stop(self) -> None:
        for uploader in self.uploaders:
            uploader.stop()
        self.uploaders = []

    def wait_for(self, step: int, ranks: int) -> None:
        def idle() -> bool:
            return {r for r, c in self.outcomes if c.failure is None and not c.bytes and c.step >= step} >= set(
                range(ranks)
            )

        assert clock.wait_until(idle, LONG_S, 0.02), self.outcomes


@pytest.fixture
def store(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr(remote, "RETRY_BACKOFF_S", (0.05, 0.2))
    monkeypatch.setattr(remote, "POLL_BACKOFF_S", (0.01, 0.05))
    store = Store(root)
    yield store
    store.stop()


def save_for_ranks(root: Path, step: int, ranks: int) -> Path:
    """Save a checkpoint with files of ``ranks`` ranks and a metadata file; return its folder."""
    folder = save(root, step, state_of(float(step)))
    extra = {f"rank-{r}.bin": bytes([r]) * 10 for r in range(1, ranks)} | {".metadata": b"m"}
    for name, data in extra.items():
        (folder / name).write_bytes(data)
    manifest = index.read_manifest(folder)
    sizes = {**manifest.files, **{n: len(d) for n, d in extra.items()}}
    index.write_manifest(folder, msgspec.structs.replace(manifest, files=sizes, world_size=ranks))
    return folder


def stored_files(store: Store) -> dict[str, bytes]:
    folder = RemoteFolder(store.url)
    return {name: (folder / name).read_bytes() for name in folder.sizes()}


def test_copies_are_complete_when_files_are_linked(store: Store, root: Path) -> None:
    model = torch.nn.Linear(600, 600).requires_grad_(False)
    for step in (3, 6):
        save(root, step, {"model": model, "step": torch.tensor(step)})
    store.start(2)
    store.wait_for(6, 2)
    assert index.read_manifest(index.step_folder(root, 6)).linked == ("rank-0.frozen-0.bin",)
    shutil.rmtree(root)
    for step in (3, 6):
        assert inspect.find_damage(index.step_folder(RemoteFolder(store.url), step)) == []


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_every_rank_uploads_its_share(store: Store, root: Path, ranks: int) -> None:
    save_for_ranks(root, 3, 4)
    store.start(ranks)
    store.wait_for(3, ranks)
    assert stored_files(store) == {k: v for k, v in files(root).items() if k != ANNOUNCEMENT_FILE}
    save_for_ranks(root, 6, 4)
    for uploader in store.uploaders:
        uploader.notify_saved(6)
    store.wait_for(6, ranks)
    assert steps(RemoteFolder(store.url)) == [3, 6]
    assert [(r, c.step) for r, c in store.outcomes if c.bytes] == [(0, 3), (0, 6)]


@pytest.mark.parametrize(
    ("name", "rank"),
    [("rank-12.bin", 12), ("__3_0.distcp", 3), ("rank-4/segment-7", 4), (".metadata", 0), ("manifest.json", 0)],
)
def test_files_belong_to_the_rank_in_their_name(name: str, rank: int) -> None:
    assert owner_rank(name) == rank


def test_missing_share_delays_commit_until_next_attempt(store: Store, root: Path) -> None:
    save_for_ranks(root, 3, 2)
    store.start(2, missing=1)
    remote_folder = RemoteFolder(store.url) / "step-00000003"
    assert clock.wait_until(lambda: ".uploaded-0" in remote_folder.sizes(), LONG_S, 0.02)
    assert not index.has_commit_marker(remote_folder)
    # The next attempt has another number of ranks, so the uploaded share does not count.
    store.start(1, attempt="2")
    store.wait_for(3, 1)
    assert stored_files(store) == {k: v for k, v in files(root).items() if k != ANNOUNCEMENT_FILE}


def test_step_saved_again_replaces_whole_copy(store: Store, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_for_ranks(root, 3, 2)
    store.start(2)
    store.wait_for(3, 2)
    remote_folder = RemoteFolder(store.url) / "step-00000003"
    old = stored_files(store)
    shutil.rmtree(root / "step-00000003")
    save(root, 3, state_of(30.0))
    committed_during_upload: list[bool] = []
    original = Uploader._upload_file

    def put(self: Uploader, *args: Any) -> None:
        committed_during_upload.append(index.has_commit_marker(remote_folder))
        original(self, *args)

    monkeypatch.setattr(Uploader, "_upload_file", put)
    store.outcomes.clear()
    store.start(2, attempt="2")
    store.wait_for(3, 2)
    assert committed_during_upload and not any(committed_during_upload)  # a partly replaced copy was never committed
    assert stored_files(store) != old
    inspect.verify(remote_folder)


def test_checkpoint_under_upload_is_protected(store: Store, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, release = threading.Event(), threading.Event()
    original = Uploader._upload_file

    def put(self: Uploader, *args: Any) -> None:
        started.set()
        assert release.wait(LONG_S)
        original(self, *args)

    monkeypatch.setattr(Uploader, "_upload_file", put)
    save(root, 3, state_of(3.0))
    (uploader,) = store.start(1)
    assert started.wait(LONG_S)
    assert uploader.protected_steps() == (3,)
    release.set()
    store.wait_for(3, 1)
    assert uploader.protected_steps() == ()


def test_checkpoint_deleted_during_upload_is_skipped(store: Store, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Uploader._upload_file

    def put(self: Uploader, path: Path, target: Any) -> None:
        shutil.rmtree(path.parent, ignore_errors=True)
        original(self, path, target)

    monkeypatch.setattr(Uploader, "_upload_file", put)
    save(root, 3, state_of(3.0))
    store.start(1)
    store.wait_for(0, 1)
    assert [c.failure is not None for _, c in store.outcomes] == [True, False]
    assert [p for p in index.list_checkpoint_folders(RemoteFolder(store.url)) if index.has_commit_marker(p)] == []


@pytest.mark.parametrize("name", ["rank-0.bin", "manifest.json"])
def test_damaged_checkpoint_is_not_uploaded(store: Store, root: Path, name: str) -> None:
    for step in (3, 6):
        save(root, step, state_of(float(step)))
    os.truncate(root / "step-00000006" / name, 5)
    store.start(1)
    store.wait_for(3, 1)
    remote_folder = RemoteFolder(store.url)
    assert [
        index.parse_step(p) for p in index.list_checkpoint_folders(remote_folder) if index.has_commit_marker(p)
    ] == [3]
    assert [(c.step, name in c.failure.message) for _, c in store.outcomes if c.failure] == [(6, True)]


def test_remote_retention_follows_policy(store: Store, root: Path) -> None:
    policy = RetentionPolicy(keep=1, keep_every=100)
    for step in (50, 100, 150, 200, 250):
        save(root, step, state_of(float(step)))
    store.start(1, policy=policy)
    store.wait_for(250, 1)
    remote_folder = RemoteFolder(store.url)
    assert steps(remote_folder) == [100, 200, 250]
    assert [c.step for _, c in store.outcomes if c.bytes] == [250, 200, 100]
    for step in (50, 100, 150, 200, 250):  # the local ones may be deleted meanwhile
        shutil.rmtree(root / f"step-{step:08d}")
    save(root, 260, state_of(260.0))
    (remote_folder / "step-00000240" / "rank-0.bin").write_bytes(b"of an attempt that was killed")
    store.uploaders[0].notify_saved(260)
    store.wait_for(260, 1)
    assert steps(remote_folder) == [100, 200, 260]


def test_foreign_change_in_store_is_repaired(store: Store, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_for_ranks(root, 3, 2)
    original, pending = Uploader._commit_remote, [True]

    def commit(self: Uploader, step: int, *args: Any) -> None:
        if pending and clock.wait_until(lambda: ".uploaded-1" in remote_folder.sizes(), LONG_S, 0.02):
            pending.pop()
            (remote_folder / "rank-1.bin").write_bytes(b"x")
        original(self, step, *args)

    remote_folder = RemoteFolder(store.url) / "step-00000003"
    monkeypatch.setattr(Uploader, "_commit_remote", commit)
    store.start(2)
    store.wait_for(3, 2)
    assert any(
        "has a different size than the uploaded file" in c.failure.message for _, c in store.outcomes if c.failure
    )
    assert stored_files(store) == {k: v for k, v in files(root).items() if k != ANNOUNCEMENT_FILE}


def test_missing_share_is_reported_after_timeout(store: Store, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "SHARE_TIMEOUT_S", 0.1)
    save_for_ranks(root, 3, 2)
    store.start(2, missing=1)
    assert clock.wait_until(lambda: any(c.failure for _, c in store.outcomes), LONG_S, 0.02)
    assert "the files of rank 1 did not arrive in 0.1 s" in store.outcomes[0][1].failure.message  # type: ignore[union-attr]


def test_announcement_of_another_attempt_is_ignored(store: Store, root: Path) -> None:
    save_for_ranks(root, 3, 2)
    (root / ANNOUNCEMENT_FILE).write_text(json.dumps({"attempt": "1", "nth": 1, "upto": 0, "step": 3, "marker": "x"}))
    job = UploadJob(url=store.url, root=str(root), rank=1, world_size=2, attempt="2", policy=RetentionPolicy())
    uploader = Uploader(job, lambda c: None, lambda: None)
    assert uploader._read_announcement() is None
    (root / ANNOUNCEMENT_FILE).write_text("{")
    assert uploader._read_announcement() is None


def test_end_of_rank_0_releases_other_ranks(store: Store, root: Path) -> None:
    root.mkdir()
    first, second = store.start(2)
    store.wait_for(0, 1)
    first.stop()
    second.notify_saved(3)
    first.announce_end()
    assert clock.wait_until(lambda: any(r == 1 and c.step >= 3 for r, c in store.outcomes), LONG_S, 0.02)


def test_upload_yields_to_saves_and_stops_on_request(store: Store, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "CHUNK_BYTES", 1000)
    calls: list[int] = []
    job = UploadJob(url=store.url, root=str(root), rank=0, world_size=1, attempt="1", policy=RetentionPolicy())

    def yield_to_save() -> None:
        calls.append(1)
        if len(calls) == 3:
            uploader.stop()

    uploader = Uploader(job, lambda c: None, yield_to_save)
    save(root, 3, state_of(3.0))
    thread = threading.Thread(target=uploader._run)
    thread.start()
    thread.join(LONG_S)
    assert not thread.is_alive() and len(calls) == 3
    assert not index.has_commit_marker(RemoteFolder(store.url) / "step-00000003")
