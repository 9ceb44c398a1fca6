"""The contract of every engine, and checkpoints read by the tools of DCP and torchsnapshot."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import random
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, zeros

from clustertrain.checkpoint.core.ranks import Ranks
from clustertrain.checkpoint.format import manifest as index
from clustertrain.checkpoint.format.manifest import ShardRecord, TensorRecord
from clustertrain.checkpoint.format.staged_segments import Segment, SegmentLocation
from clustertrain.checkpoint.manager import CheckpointConfig, CheckpointManager
from clustertrain.checkpoint.offline import inspect
from clustertrain.checkpoint.save.engines import ENGINES, Engine, get_engine, library
from clustertrain.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.long

DTYPES = sorted(
    (v for v in vars(torch).values() if isinstance(v, torch.dtype) and not str(v).startswith("torch.q")), key=str
)


class Staging:
    """A rank's staging memory, with random bytes in it."""

    def __init__(self, rank: int = 0) -> None:
        self.segments: list[Segment] = []
        self._random = random.Random(rank)
        self._data = bytearray()

    def add(
        self,
        name: str,
        part: Sequence[int],
        dtype: torch.dtype = torch.uint8,
        *,
        data: bytes | None = None,
        shape: Sequence[int] | None = None,
        start: Sequence[int] | None = None,
    ) -> None:
        nbytes = prod(part) * dtype.itemsize
        segment = Segment(
            name=name,
            kind="model",
            dtype=str(dtype).removeprefix("torch."),
            itemsize=dtype.itemsize,
            shape=tuple(part if shape is None else shape),
            start=(0,) * len(part) if start is None else tuple(start),
            chunk_shape=tuple(part),
            buffer_offset=len(self._data),
            nbytes=nbytes,
        )
        self.segments.append(segment)
        self._data += self._random.randbytes(nbytes) if data is None else data

    def add_rows(self, name: str, whole: torch.Tensor, first: int, end: int) -> None:
        rows = whole[first:end].contiguous()
        data = rows.view(torch.uint8).numpy().tobytes()
        self.add(name, rows.shape, rows.dtype, data=data, shape=whole.shape, start=[first] + [0] * (whole.dim() - 1))

    @property
    def memory(self) -> memoryview:
        return memoryview(self._data)

    def expected(self) -> list[bytes]:
        return [bytes(self._data[s.buffer_offset : s.buffer_offset + s.nbytes]) for s in self.segments]


def read_segments(folder: Path, staging: Staging, locations: Sequence[SegmentLocation]) -> list[bytes]:
    """Return the bytes at ``locations``, read with only the file names, offsets and lengths."""
    assert len(locations) == len(staging.segments)
    contents = []
    for location, segment in zip(locations, staging.segments, strict=True):
        with (folder / location.file).open("rb") as file:
            file.seek(location.offset)
            contents.append(file.read(segment.nbytes))
    return contents


def records(ranks: Sequence[tuple[Staging, Sequence[SegmentLocation]]]) -> list[TensorRecord]:
    """Return the tensor records of what the ranks wrote, as engines see them."""
    heads: dict[str, Segment] = {}
    shards: dict[str, list[ShardRecord]] = {}
    for staging, locations in ranks:
        for s, location in zip(staging.segments, locations, strict=True):
            heads[s.name] = s
            fields = {
                "file": location.file,
                "offset": location.offset,
                "nbytes": s.nbytes,
                "start": s.start,
                "shape": s.chunk_shape,
            }
            tensor_shards = shards.setdefault(s.name, [])
            if s.nbytes:
                # Engines do not know checksums.
                tensor_shards.append(ShardRecord(**{**dict.fromkeys(ShardRecord.__struct_fields__, ""), **fields}))
    return [
        TensorRecord(name=n, kind=s.kind, dtype=s.dtype, itemsize=s.itemsize, shape=s.shape, shards=tuple(shards[n]))
        for n, s in sorted(heads.items())
    ]


def all_kinds_of_segments() -> Staging:
    staging = Staging()
    staging.add("model/odd", [3])  # so that nothing after it is aligned
    for dtype in DTYPES:
        staging.add(f"model/{dtype}", [2, 3], dtype)
    staging.add("other/scalar", [], torch.float64)
    staging.add("model/none", [0, 7], torch.bfloat16)
    staging.add("model/large", [17 << 20])
    staging.add("model/none too", [0])
    staging.add(f"model/{'long name.' * 40}/../ü %2F", [5], torch.int16)
    for n in range(300):
        staging.add(f"optimizer/state/{n}/step", [], torch.float32)
    return staging


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Engine:
    return get_engine(request.param)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_segments_are_at_their_reported_locations(engine: Engine, tmp_path: Path) -> None:
    staging = all_kinds_of_segments()
    locations = engine.write(tmp_path, 0, staging.segments, staging.memory.toreadonly())
    assert read_segments(tmp_path, staging, locations) == staging.expected()
    engine.finish(tmp_path, records([(staging, locations)]))
    assert read_segments(tmp_path, staging, locations) == staging.expected()


@pytest.mark.parametrize("parts", [[], [0, 0]], ids=["no segment", "empty segments"])
def test_rank_without_data_can_write(engine: Engine, parts: list[int], tmp_path: Path) -> None:
    staging = Staging()
    for n, part in enumerate(parts):
        staging.add(f"model/{n}", [part])
    locations = engine.write(tmp_path, 0, staging.segments, staging.memory)
    assert read_segments(tmp_path, staging, locations) == staging.expected()
    engine.finish(tmp_path, records([(staging, locations)]))


def test_ranks_write_separate_files_and_never_overwrite(engine: Engine, tmp_path: Path) -> None:
    ranks = []
    for rank in (0, 1, 11):
        staging = Staging(rank)
        for n in range(4):
            staging.add(f"model/{n}", [1 << (n * 5)], shape=[12 << (n * 5)], start=[rank << (n * 5)])
        ranks.append((staging, engine.write(tmp_path, rank, staging.segments, staging.memory)))
    for staging, locations in ranks:
        assert read_segments(tmp_path, staging, locations) == staging.expected()
    with pytest.raises(FileExistsError):
        engine.write(tmp_path, 1, ranks[0][0].segments, ranks[0][0].memory)
    for staging, locations in ranks:
        assert read_segments(tmp_path, staging, locations) == staging.expected()


def test_part_and_index_can_be_written_again(engine: Engine, tmp_path: Path) -> None:
    """As after a kill: all files of a part match its patterns, and a leftover index is replaced."""
    ranks = {}
    for rank in (0, 1, 11):
        staging = Staging(rank)
        staging.add(f"model/{rank}", [20 << 20])
        staging.add(f"model/none {rank}", [0])
        before = set(tmp_path.iterdir())
        ranks[rank] = (staging, engine.write(tmp_path, rank, staging.segments, staging.memory))
        created = set(tmp_path.iterdir()) - before
        assert created == {p for pattern in engine.patterns for p in tmp_path.glob(pattern.format(rank=rank))} != set()
    engine.finish(tmp_path, records(list(ranks.values())))
    for pattern in engine.patterns:
        for path in tmp_path.glob(pattern.format(rank=1)):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    staging = ranks[1][0]
    ranks[1] = (staging, engine.write(tmp_path, 1, staging.segments, staging.memory))
    (tmp_path / ".metadata.tmp").write_bytes(b"half an index")
    engine.finish(tmp_path, records(list(ranks.values())))
    for staging, locations in ranks.values():
        assert read_segments(tmp_path, staging, locations) == staging.expected()


def test_all_files_are_synced(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: dict[int, Any] = {}
    real = os.fsync

    def state(path: Path) -> Any:
        return sorted(p.name for p in path.iterdir()) if path.is_dir() else path.stat().st_size

    def fsync(fd: int) -> None:
        real(fd)
        synced[os.fstat(fd).st_ino] = state(Path(f"/proc/self/fd/{fd}").readlink())

    def unsynced(paths: list[Path]) -> list[Path]:
        return [p for p in paths if synced.get(p.stat().st_ino) != state(p)]

    monkeypatch.setattr(os, "fsync", fsync)
    staging = Staging()
    for n in range(20):
        staging.add(f"model/{n}", [(1 << n) + n])
    staging.add("model/large", [17 << 20])
    locations = engine.write(tmp_path, 0, staging.segments, staging.memory)
    assert list(tmp_path.iterdir())
    assert unsynced(list(tmp_path.rglob("*"))) == []
    engine.finish(tmp_path, records([(staging, locations)]))
    # The raw engine leaves the folder itself to the commit.
    assert unsynced([*tmp_path.rglob("*"), *([] if engine.name == "raw" else [tmp_path])]) == []


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """A folder with space for 1 MiB, and the errno of a larger write. Without the right to mount, a limit per file."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() == 0 and subprocess.run(mount, capture_output=True, check=False).returncode == 0:
        yield folder, errno.ENOSPC
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
    else:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
        yield folder, errno.EFBIG
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# Python 3.13 and later report that DCP's stream cannot flush again when it is deleted.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <torch.distributed:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "sizes",
    [[40 << 20], [4096] * 800, [100, 0, 3 << 20, 200, 20 << 20, 20 << 20]],
    ids=["one large", "many small", "mixed"],
)
def test_full_disk_raises_os_error_and_ends_all_writes(
    engine: Engine, sizes: list[int], full_disk: tuple[Path, int], caplog: pytest.LogCaptureFixture
) -> None:
    disk, expected_errno = full_disk
    staging = Staging()
    for n, size in enumerate(sizes):
        staging.add(f"model/{n}", [size])
    threads = set(threading.enumerate())
    with pytest.raises(OSError) as error:
        engine.write(disk, 0, staging.segments, staging.memory)
    assert error.value.errno == expected_errno
    del error
    gc.collect()
    assert [t for t in set(threading.enumerate()) - threads if t.is_alive()] == []
    assert caplog.records == []


def test_torchsnapshot_finishes_started_writes_before_failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = get_engine("torchsnapshot")
    started, finished = set(), set()

    async def write(self: object, write_io: Any) -> None:
        if write_io.path == "segment-0":
            while len(started) < 3:
                await asyncio.sleep(0)
            raise OSError(errno.ENOSPC, "full")
        started.add(write_io.path)
        for _ in range(100):
            await asyncio.sleep(0)
        finished.add(write_io.path)

    monkeypatch.setattr("torchsnapshot.storage_plugins.fs.FSStoragePlugin.write", write)
    staging = Staging()
    for n in range(4):
        staging.add(f"model/{n}", [17 << 20])
    with pytest.raises(OSError, match="full"):
        engine.write(tmp_path, 0, staging.segments, staging.memory)
    assert finished == started == {"segment-1", "segment-2", "segment-3"}


@pytest.mark.parametrize("name", ["dcp", "torchsnapshot"])
def test_full_disk_in_finish_raises_os_error(name: str, full_disk: tuple[Path, int]) -> None:
    disk, expected_errno = full_disk
    staging = Staging()
    for n in range(20):
        staging.add(f"model/{n}", [4])
    locations = get_engine(name).write(disk, 0, staging.segments, staging.memory)
    if expected_errno == errno.ENOSPC:
        with pytest.raises(OSError), (disk / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    with pytest.raises(OSError) as error:
        get_engine(name).finish(disk, records([(staging, locations)]))
    assert error.value.errno == expected_errno


def test_wrong_location_is_detected(tmp_path: Path) -> None:
    staging = Staging()
    staging.add("model/a", [1000])
    staging.add("model/b", [1000])
    (tmp_path / "file").write_bytes(staging.memory)
    right = [SegmentLocation(file="file", offset=0), SegmentLocation(file="file", offset=1000)]
    library.fsync_and_verify(tmp_path, staging.segments, right, staging.memory)
    for offset in (999, 1001, 0, 5000):
        wrong = [right[0], SegmentLocation(file="file", offset=offset)]
        with pytest.raises(CheckpointError, match="model/b"):
            library.fsync_and_verify(tmp_path, staging.segments, wrong, staging.memory)
    os.truncate(tmp_path / "file", 1999)
    with pytest.raises(CheckpointError, match="model/b"):
        library.fsync_and_verify(tmp_path, staging.segments, right, staging.memory)


def test_missing_library_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "clustertrain.checkpoint.save.engines.torchsnapshot", raising=False)
    for name in [n for n in sys.modules if n.partition(".")[0] == "torchsnapshot"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchsnapshot", None)
    with pytest.raises(ConfigError, match=r"torchsnapshot.*\n.*pip install"):
        get_engine("torchsnapshot")


def write_two_ranks(name: str, folder: Path) -> dict[str, torch.Tensor]:
    """Write a checkpoint of two ranks; return its tensors."""
    torch.manual_seed(1)
    whole = {
        "model/rows": torch.randn(7, 6),
        "model/half": torch.randn(4, 3).bfloat16(),
        "model/eight bits": torch.randn(6, 2).to(torch.float8_e4m3fn),
        "model/complex": torch.randn(5, dtype=torch.complex64),
        "model/mask": torch.rand(9) > 0.5,
    }
    rank_1_only = {"other/step": torch.tensor(12.0), "other/count": torch.tensor([7, 65_535], dtype=torch.uint16)}
    ranks = []
    for rank in (0, 1):
        staging = Staging()
        for key, t in whole.items():
            cut = (len(t) + 1) // 2
            staging.add_rows(key, t, *((0, cut), (cut, len(t)))[rank])
        if rank == 1:
            for key, t in rank_1_only.items():
                staging.add(key, t.shape, t.dtype, data=t.reshape(-1).view(torch.uint8).numpy().tobytes())
            staging.add("other/none", [0, 3], torch.float16)
        ranks.append((staging, get_engine(name).write(folder, rank, staging.segments, staging.memory)))
    get_engine(name).finish(folder, records(ranks))
    return {**whole, **rank_1_only}


def bitwise_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape) and bool(
        (a.reshape(-1).view(torch.uint8) == b.reshape(-1).view(torch.uint8)).all()
    )


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_loads_dcp_checkpoint(tmp_path: Path) -> None:
    tensors = write_two_ranks("dcp", tmp_path)
    state: dict[str, Any] = {name: torch.zeros_like(t) for name, t in tensors.items()}
    state["other/none"] = torch.zeros(0, 3, dtype=torch.float16)
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert [name for name, t in tensors.items() if not bitwise_equal(state[name], t)] == []


def test_torch_converts_dcp_checkpoint_to_one_file(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    tensors = write_two_ranks("dcp", tmp_path / "checkpoint")
    dcp_to_torch_save(tmp_path / "checkpoint", tmp_path / "one.pt")
    loaded = torch.load(tmp_path / "one.pt", weights_only=True)
    assert loaded.pop("other/none").shape == (0, 3)
    assert loaded.keys() == tensors.keys()
    assert [name for name, t in tensors.items() if not bitwise_equal(loaded[name], t)] == []


@pytest.fixture
def rank_1_of_3() -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=1, world_size=3, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.usefixtures("rank_1_of_3")
@pytest.mark.parametrize("dim", [0, 1])
def test_torch_loads_dcp_checkpoint_into_other_sharding(dim: int, tmp_path: Path) -> None:
    tensors = write_two_ranks("dcp", tmp_path)
    mesh = init_device_mesh("cpu", (3,))
    state: dict[str, Any] = {"model/rows": zeros(7, 6, device_mesh=mesh, placements=[Shard(dim)])}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    loaded: DTensor = state["model/rows"]
    assert bitwise_equal(loaded.to_local(), tensors["model/rows"].chunk(3, dim)[1].contiguous())


def stored_as(t: torch.Tensor) -> torch.Tensor:
    """Return ``t`` in the dtype that torchsnapshot 0.1 stores instead of one that it does not know."""
    other = {torch.float8_e4m3fn: torch.uint8, torch.uint16: torch.int16}
    return t.view(other.get(t.dtype, t.dtype))


def test_torchsnapshot_reads_its_checkpoint(tmp_path: Path) -> None:
    tensors = write_two_ranks("torchsnapshot", tmp_path)
    from torchsnapshot import Snapshot

    snapshot = Snapshot(str(tmp_path))
    for name, t in tensors.items():
        out = torch.zeros_like(stored_as(t))
        snapshot.read_object(f"0/{name}", obj_out=out)
        assert bitwise_equal(out, stored_as(t)), name
    assert snapshot.get_manifest().keys() == {f"0/{name}" for name in tensors}
    # It knows the shape of tensors that one rank has written.
    assert bitwise_equal(snapshot.read_object("0/other/step"), tensors["other/step"])


def test_every_engine_restores_and_verifies(engine: Engine, tmp_path: Path) -> None:
    def state_of(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        return {"model": torch.nn.Linear(70, 50).bfloat16(), "mask": torch.rand(9) > 0.5, "step": torch.tensor(seed)}

    manager = CheckpointManager(
        tmp_path, Ranks(), CheckpointConfig(attempt="1", layout={}, engine=engine.name, async_save=False)
    )
    saved, restored_state = state_of(1), state_of(2)
    manager.save(7, saved)
    restored = manager.restore(restored_state)
    assert restored is not None
    assert restored.step == 7
    assert bitwise_equal(restored_state["model"].weight.detach(), saved["model"].weight.detach())
    assert [bitwise_equal(restored_state[k], saved[k]) for k in ("mask", "step")] == [True, True]
    inspect.verify(index.list_checkpoint_folders(tmp_path)[0])


@pytest.mark.usefixtures("rank_1_of_3")
def test_engine_ignores_process_group(engine: Engine, tmp_path: Path) -> None:
    staging = Staging()
    staging.add("model/a", [1000])
    locations = engine.write(tmp_path, 0, staging.segments, staging.memory)
    engine.finish(tmp_path, records([(staging, locations)]))
    assert read_segments(tmp_path, staging, locations) == staging.expected()


def in_halves(value: torch.Tensor, file: Any, save: Callable[..., None] = torch.save) -> None:
    save([value[: len(value) // 2].clone(), value[len(value) // 2 :].clone()], file)


def in_legacy_format(value: torch.Tensor, file: Any, save: Callable[..., None] = torch.save) -> None:
    save(value, file, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize("save", [in_halves, in_legacy_format])
def test_unexpected_torch_save_format_is_refused(
    save: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "save", save)
    staging = Staging()
    staging.add("model/a", [1000])
    with pytest.raises(CheckpointError, match=r"model/a.*contiguously and unchanged"):
        get_engine("dcp").write(tmp_path, 0, staging.segments, staging.memory)
