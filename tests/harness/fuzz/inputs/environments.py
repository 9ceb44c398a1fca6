"""The environment of a command: Slurm's answers, environment variables, and data that a recipe names."""

from __future__ import annotations

import json
import os
import shutil
import time
from unittest import mock

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from clustertrain import fsio
from tests.fakes.slurm.recorded import read_answer
from tests.harness.fuzz.inputs.commands import RUN
from tests.harness.fuzz.inputs.damage import byte_changes, change
from tests.harness.fuzz.inputs.text import arguments, numbers, words
from tests.harness.fuzz.play import InputClass
from tests.harness.fuzz.sandbox import Sandbox
from tests.tiny_tokenizer import VOCAB_SIZE, write_tokenizer
from tests.unit.report.live_runs import begin, new_run

STATES = ("RUNNING", "PENDING", "COMPLETING", "CANCELLED by 0", "NODE_FAIL", "PREEMPTED", "SIGNALING", "NEW_STATE", "")
NODES = ("node[01-02]", "node[", "a]b", "n[1-99999999]", "n[2-1]", "n[1-2][3-4]", "", "None assigned", ",,,", "node01")
ERRORS = (
    b"", b"slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n", b"\xff\xfe\n", b"x" * 10_000,
    b"squeue: error: Unexpected message received\n", b"\x1b]52;c;eA==\x07",
)  # fmt: skip
# Recorded output of Slurm's commands.
SITE = {
    "scontrol.config": "config-22.05.8",
    "scontrol.partition": "partition-22.05.8",
    "scontrol.node": "node-22.05.8",
}
SLURM_CALLS = (
    ("status", RUN), ("status", RUN, "--json"), ("list",), ("top", RUN, "--once"), ("telemetry", RUN), ("logs", RUN),
    ("cluster", "detect", "found", "--dry-run", "--no-measure"), ("submit", "--dry-run", "--backend", "slurm"),
    ("cancel", RUN), ("status", "4711"),
)  # fmt: skip
VARIABLES = (
    "CLUSTERTRAIN_HOME", "CLUSTERTRAIN_CLUSTER", "CLUSTERTRAIN_CLUSTER_PATH", "XDG_CONFIG_HOME", "XDG_DATA_HOME",
    "HOME", "PATH", "COLUMNS", "TERM", "NO_COLOR", "LANG", "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_RESTART_COUNT",
    "SLURM_JOB_GPUS", "SLURM_CPUS_ON_NODE", "SLURM_MEM_PER_NODE", "CUDA_VISIBLE_DEVICES", "CLUSTERTRAIN_RUN_DIR",
    "CLUSTERTRAIN_ATTEMPT", "WORLD_SIZE", "RANK", "SBATCH_PARTITION", "NCCL_CONF_FILE", "OMP_NUM_THREADS", "TMPDIR",
)  # fmt: skip
CALLS = (("list",), ("plan",), ("submit", "--dry-run"), ("cluster", "list"), ("status",), ("cluster", "show", "x"))


def _squeue() -> SearchStrategy[bytes]:
    field = st.one_of(words(), numbers().map(str), st.sampled_from((*STATES, *NODES)))
    line = st.builds(
        lambda state, nodes, more: "|".join(("4711", state, "1", "10", "20", "N/A", nodes, more, "")),
        st.sampled_from(STATES), st.sampled_from(NODES), words(),
    )  # fmt: skip
    arbitrary = st.lists(field, max_size=12).map("|".join)
    return st.lists(line | arbitrary, max_size=4).map(lambda lines: "\n".join(lines).encode("utf-8", "surrogatepass"))


def _sacct() -> SearchStrategy[bytes]:
    line = st.builds(
        lambda state, nodes, start: "|".join(("4711", state, start, "40", nodes, "0:0", "None")),
        st.sampled_from(STATES), st.sampled_from(NODES), numbers().map(str) | words(),
    )  # fmt: skip
    return st.lists(line, max_size=4).map(lambda lines: "\n".join(lines).encode("utf-8", "surrogatepass"))


def answers() -> SearchStrategy[tuple[dict[str, bytes], bytes, int, tuple[str, ...]]]:
    damaged = {
        name: st.builds(change, st.just(read_answer(name_recorded).encode()), byte_changes())
        for name, name_recorded in SITE.items()
    }
    site_output = st.fixed_dictionaries({}, optional=damaged)
    job_output = st.fixed_dictionaries({"squeue": _squeue(), "sacct": _sacct()})
    output = st.builds(lambda a, b: {**a, **b}, site_output, job_output)
    return st.tuples(output, st.sampled_from(ERRORS), st.sampled_from((0, 0, 1, 127)), st.sampled_from(SLURM_CALLS))


def play_answers(box: Sandbox, drawn: tuple[dict[str, bytes], bytes, int, tuple[str, ...]]) -> None:
    output, errors, status, argv = drawn
    folder = box.home / "runs" / RUN
    shutil.rmtree(folder, ignore_errors=True)
    now = time.time()
    run = new_run(box.home, now, name=RUN, spec='[job]\nbackend = "slurm"\n')
    begin(run, now, ["node01"], steps=20)
    attempt = run.attempt(1)
    fsio.write_json(attempt.record, {"job_id": "4711", "restart": 0, "nodes": ["node01"], "host": "node01", "t": now})
    box.answer({name: box.arm_bytes(text) for name, text in output.items()}, errors, status)
    box.call(argv, terminal_safe=argv[0] != "submit")


def play_environment(box: Sandbox, drawn: tuple[dict[str, str], tuple[str, ...]]) -> None:
    variables, argv = drawn
    # Users may write to any folder that they name, but the judge allows only the site and the home.
    with mock.patch.dict(os.environ, {name: box.arm(value) for name, value in variables.items()}):
        box.call(argv)


def environments() -> SearchStrategy[tuple[dict[str, str], tuple[str, ...]]]:
    value = st.one_of(arguments(), numbers().map(str), st.sampled_from(NODES))
    variables = st.dictionaries(
        st.sampled_from(VARIABLES), value.map(lambda v: v.replace("\0", "")), min_size=1, max_size=3
    )
    return st.tuples(variables, st.sampled_from(CALLS))


TEXTS = (
    b"one line\nanother\n", b'{"text": "a document"}\n{"text": "another"}\n',
    b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n',
    b'{"prompt": "a", "completion": "b"}\n',
)  # fmt: skip


def data() -> SearchStrategy[tuple[bytes, bool, list[str]]]:
    """Draw a text file, whether the shards made from it are damaged, and options of `data tokenize`."""
    options = st.sampled_from((
        [], ["--documents", "jsonl"], ["--documents", "lines"], ["--documents", "jsonl", "--key", "no"],
        ["--dtype", "uint32"], ["--end", "255"], ["--shard-tokens", "1"], ["--pattern", "../*"],
        ["--tokenizer", "no.such:thing"], ["--dtype", "uint8", "--end", "256"],
    ))  # fmt: skip
    text = st.one_of(st.binary(max_size=200), st.builds(change, st.sampled_from(TEXTS), byte_changes()))
    return st.tuples(text, st.booleans(), options)


def play_data(box: Sandbox, drawn: tuple[bytes, bool, list[str]]) -> None:
    text, damaged, options = drawn
    folder = box.fresh("data")
    (folder / "text").write_bytes(text)
    result = box.call(["data", "tokenize", str(folder / "text"), "--output", str(folder / "shards"), *options])
    shards = sorted((folder / "shards").glob("*")) if result.code == 0 else []
    if damaged and shards:
        path = shards[len(text) % len(shards)]
        path.write_bytes(change(path.read_bytes(), ("cut", len(text)) if len(text) % 2 else ("end", text)))
    tokenizer = write_tokenizer(folder / "tokenizer")
    template = tokenizer / "tokenizer_config.json"
    template.write_bytes(change(template.read_bytes(), ("end", text)) if damaged else template.read_bytes())
    for data_keys in (
        {"kind": "tokens", "path": str(folder / "shards")},
        {"kind": "text", "path": str(folder / "text")},
        {"kind": "chat", "path": str(folder / "text"), "tokenizer": str(tokenizer)},
    ):
        vocabulary = ["--set", f"model.vocab_size={VOCAB_SIZE}"] if data_keys["kind"] == "chat" else []
        pairs = [word for key, value in data_keys.items() for word in ("--set", f"data.{key}={json.dumps(value)}")]
        box.call(["submit", "--dry-run", "--backend", "local", "--nodes", "1", "--gpus", "1", *pairs, *vocabulary])


CLASSES = (
    InputClass("answers", answers, play_answers, 40),
    InputClass("environments", environments, play_environment, 15),
    InputClass("data", data, play_data, 60),
)
