"""Loading pretrained weights into FSDP shards, against Transformers, DCP's reader of the same files, and a raw read.

The weights are a Llama in bf16, in several safetensors files that are not in the page cache. Each loader fills the
same shards, and the benchmark compares them. All run in the same processes, in rounds with changing order, and are
compared within a round.

raw read          each rank reads as many bytes as its share, into existing memory
clustertrain      session.load_pretrained's loader: each rank reads the ranges of its shards
DCP               dcp.load with HuggingFaceStorageReader
from_pretrained   each rank loads the whole model with Transformers, then fully_shard keeps its shards

    python -m benchmarks.pretrained --ranks 2 --layers 16
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard

from benchmarks import measure
from benchmarks.checkpoint import Comparison, Round, round_order
from benchmarks.checkpoint_writers import CHUNK_BYTES
from benchmarks.cold import MEMORY_FILE_SYSTEMS, file_system, make_cold
from benchmarks.measure import CannotRun
from benchmarks.rank_team import Team, run_team
from benchmarks.verdict import Goal, interval, verdict
from clustertrain.checkpoint.core.ranks import Ranks
from clustertrain.checkpoint.core.state_dict import to_local_shard
from clustertrain.checkpoint.load.pretrained import load_pretrained

ROUNDS = 7
MAX_FILE_BYTES = 256 << 20
RAW, OURS, DCP, WHOLE = "raw read", "clustertrain", "dcp.load", "from_pretrained and fully_shard"
READ, SHARE = "read", "share"
COMPARISONS = (
    Comparison("bytes/s loaded", READ, OURS, RAW, Goal(0.8, "at least")),
    Comparison("bytes/s loaded", READ, OURS, DCP, None),
    Comparison("bytes/s loaded", READ, OURS, WHOLE, None),
)
MAX_SHARE = 1.05
"""Goal: bytes that a rank reads, divided by the bytes of its shards."""


def make_config(layers: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=8, vocab_size=16384, max_position_embeddings=128, tie_word_embeddings=False,
    )  # fmt: skip


def save_model(folder: Path, layers: int) -> None:
    """Write the weights as ``save_pretrained`` does, in files of at most ``MAX_FILE_BYTES``."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(make_config(layers)).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size=MAX_FILE_BYTES)


class Loaders:
    """All loaders, by name. Each fills the shards of a model."""

    def __init__(self, team: Team, folder: Path, layers: int) -> None:
        self._team, self._folder, self._layers = team, folder, layers
        self._ranks = Ranks(team.new_control_group())
        self._mesh = dist.init_device_mesh("cpu", (team.size,))
        self._loads = 0
        self.all: dict[str, Callable[[nn.Module], None]] = {OURS: self._load, DCP: self._dcp}

    def make_shards(self) -> nn.Module:
        """Return the model with uninitialized shards."""
        from transformers import LlamaForCausalLM

        with torch.device("meta"):
            model = LlamaForCausalLM(make_config(self._layers)).to(torch.bfloat16)
        self._shard(model)
        return model.to_empty(device="cpu")

    def _shard(self, model: Any) -> None:
        for layer in model.model.layers:
            fully_shard(layer, mesh=self._mesh)
        fully_shard(model, mesh=self._mesh)

    def _load(self, model: nn.Module) -> None:
        self._loads += 1
        names = {name: name for name, _ in model.named_parameters()}
        load_pretrained(model, self._folder, names, self._ranks, token=f"load-{self._loads}")

    def _dcp(self, model: nn.Module) -> None:
        state = {name: parameter.data for name, parameter in model.named_parameters()}
        dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(self._folder)))

    def whole(self) -> nn.Module:
        """Load the whole model, then shard it."""
        from transformers import LlamaForCausalLM

        model: nn.Module = LlamaForCausalLM.from_pretrained(self._folder, dtype=torch.bfloat16)
        self._shard(model)
        return model


def locals_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: to_local_shard(name, "model", p).local_tensor for name, p in model.named_parameters()}


def load_in_rounds(team: Team, folder: Path, layers: int, rounds: int) -> list[Round]:
    """Job of a team: run all loaders in each round."""
    loaders = Loaders(team, folder, layers)
    expected = {name: t.clone() for name, t in locals_of(loaders.whole()).items()}
    own_bytes = sum(t.nbytes for t in expected.values())
    buffer = torch.ones(own_bytes, dtype=torch.uint8)
    counted = []
    for n in range(rounds + 1):  # the first warms up
        seconds: Round = {}
        for name in round_order([RAW, OURS, DCP, WHOLE], n):
            team.on_rank_0(lambda: make_cold(folder))
            gc.collect()
            if name == RAW:
                seconds[name] = {READ: team.time(lambda: _read_share(team, folder, buffer))[1]}
                continue
            model = loaders.make_shards() if name in loaders.all else None
            before = _bytes_read()
            if model is not None:
                _, elapsed = team.time(lambda name=name, model=model: loaders.all[name](model))  # type: ignore[misc]
            else:
                model, elapsed = team.time(loaders.whole)
            share = team.slowest((_bytes_read() - before) / own_bytes)
            seconds[name] = {READ: elapsed, SHARE: share}
            for key, tensor in locals_of(model).items():
                if not torch.equal(tensor, expected[key]):
                    raise CannotRun(f"{name}: {key} differs")
        if n:
            counted.append(seconds)
        times = ", ".join(f"{k} {v[READ]:.3f} s" for k, v in seconds.items())
        team.log(f"  round {n or '0 (not counted)'}: {times}; a rank read {seconds[OURS][SHARE]:.3f} of its share")
    return counted


def _read_share(team: Team, folder: Path, buffer: torch.Tensor) -> None:
    """Read as many bytes as the rank's shards have, at the rank's part of each file."""
    rest = buffer.numpy().data
    for path in sorted(folder.glob("*.safetensors")):
        part = path.stat().st_size // team.size
        with path.open("rb", buffering=0) as file:
            file.seek(team.rank * part)
            end = min(part, len(rest))
            view, rest = rest[:end], rest[end:]
            while view:
                view = view[file.readinto(view[:CHUNK_BYTES]) or len(view) :]


def _bytes_read() -> int:
    """Return the bytes that this process has read with system calls."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def build_rows(rounds: Sequence[Round]) -> Iterator[dict[str, Any]]:
    for c in COMPARISONS:
        ratios = c.ratios(rounds)
        if c.goal is None:
            ratios = [1 / r for r in ratios]  # as with a goal: the ratio of speeds
        low, high = interval(ratios)
        yield {
            "what": c.label, "ours": c.ours, "base": c.base, "ratio": measure.spread(ratios),
            "interval": [round(low, 3), round(high, 3)],
            "verdict": verdict(ratios, c.goal) if c.goal is not None else "",
        }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write the result, and return 1 if a goal was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=48, help="each has 23 MiB of weights")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--folder", type=Path, default=measure.ROOT / ".demo", help="on a disk")
    options = parser.parse_args([] if argv is None else argv)
    result = measure.context(("torch", "transformers", "safetensors"))
    options.folder.mkdir(exist_ok=True)
    if file_system(options.folder) in MEMORY_FILE_SYSTEMS:
        raise CannotRun(f"{options.folder} is in memory; choose a --folder on a disk")
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=options.folder) as scratch:
        folder = Path(scratch)
        save_model(folder, options.layers)
        size = sum(p.stat().st_size for p in folder.glob("*.safetensors"))
        print(f"{size / 2**30:.2f} GiB on {options.ranks} ranks, {file_system(folder)}", flush=True)
        threads = max(1, (os.cpu_count() or 1) // options.ranks)
        rounds = run_team(options.ranks, threads, load_in_rounds, folder, options.layers, options.rounds)
    rows = list(build_rows(rounds))
    share = measure.spread([r[OURS][SHARE] for r in rounds])
    is_share_met = share["max"] <= MAX_SHARE
    path = measure.write(
        "pretrained",
        {
            **result, "bytes": size, "ranks": options.ranks, "rows": rows, "share_read": share,
            "share_goal": MAX_SHARE, "rounds": rounds,
        },
    )  # fmt: skip
    for row in rows:
        ratio = f"{row['ratio']['median']:.2f} {row['interval']} {row['verdict']}"
        print(f"{row['what']}: {row['ours']} / {row['base']} {ratio}")
    print(f"a rank reads {share['max']:.3f} of its share at most (goal {MAX_SHARE}); written to {path}")
    return int(not is_share_met or any(row["verdict"] == "missed" for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
