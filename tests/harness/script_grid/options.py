"""What can be asked of `submit`, option by option, with what the job must see of each value."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# What tests/slurm makes on the testbed for these.
FEATURES = "ib,h100,rack1,rack2"
RESERVATION = "grid"
LICENSE, LICENSE_SERVER = "solver", "flex"

TWO_LINES = "two\nlines\n"
HOSTILE = (
    TWO_LINES,
    "a b",
    "it's",
    'say "x"',
    "$(touch pwned)",
    "`touch pwned`",
    "${HOME}/$USER",
    "a;touch pwned;b&&c||d",
    "ends in \\",
    "\\\" \\' \\\\ \\n",
    "\n#SBATCH --uid=0\nEOF\n",
    "\ttab\rreturn\x1b[0m\x7f",
    "é ü 漢 🙂 \u2028",
    "# no comment",
    "-rf * ? [a] {b,c} ~ !!",
    "{{ home }}{% endif %}{# x",
    "%j 100%",
    "",
)
# Without control characters, which a directive cannot have.
PLAIN = "a b'\"$(touch pwned)`touch pwned`\\ é #x;&|"


@dataclass(frozen=True)
class Value:
    """``words`` are typed, ``profile`` stands in the cluster profile. ``reads`` is what sbatch must understand and
    ``exports`` what must be in the job's environment."""

    words: tuple[str, ...] = ()
    profile: str = ""
    reads: Mapping[str, str] = field(default_factory=dict)
    exports: Mapping[str, str] = field(default_factory=dict)


NOT_GIVEN = Value()


@dataclass(frozen=True)
class Shape:
    nodes: int
    gpus: int
    layout: tuple[str, ...] = ()


SHAPES = (
    Shape(1, 1),
    Shape(4, 8),
    Shape(2, 4, ("--layout", "ddp")),
    Shape(1, 8, ("--layout", "zero1")),
    Shape(3, 2, ("--layout", "fsdp")),
    Shape(4, 1, ("--layout", "fsdp-grad-op")),
    Shape(4, 4, ("--layout", "hybrid-shard")),
    Shape(2, 4, ("--dp-replicate", "4", "--dp-shard", "2")),
    Shape(1, 4, ("--tp", "4")),
    Shape(2, 2, ("--pp", "2")),
    Shape(1, 2, ("--cp", "2")),
    Shape(2, 4, ("--tp", "2", "--pp", "2", "--layout", "fsdp")),
    Shape(3, 8, ("--tp", "2", "--cp", "2", "--layout", "ddp")),
    Shape(4, 8, ("--tp", "2", "--pp", "2", "--cp", "2", "--layout", "hybrid-shard")),
)


def given(option: str, *values: str) -> list[Value]:
    """Not given, and each of ``values``, which sbatch must read as they stand."""
    return [NOT_GIVEN, *(Value((f"--{option}", value), reads={option: value}) for value in values)]


def passed(key: str, value: str, reads: Mapping[str, str] | None = None) -> Value:
    """Given with --sbatch."""
    return Value(("--sbatch", f"{key}={value}"), reads={key: value} if reads is None else reads)


def placed(where: str, nodes: int) -> Value:
    """On hosts by name: as many as the job has nodes, and in 22.05 at least so many for --test-only."""
    listed = f"node[01-{nodes:02}]"
    chosen = Value(("--nodelist", listed), reads={"nodelist": listed}) if "listed" in where else NOT_GIVEN
    if "excluded" not in where or nodes == 4:
        return chosen
    excluded = Value(("--exclude", "node04"), reads={"exclude": "node04"})
    return Value((*chosen.words, *excluded.words), reads={**chosen.reads, **excluded.reads})


PLACES = ("", "listed", "excluded", "listed and excluded")
# Device and type of GPU.
DEVICES = (("", ""), ("", "h100"), ("cuda", "h100"), ("cpu", ""), ("cpu", "h100"))
GPUS_FLAGS = ("gpus-per-node", "gres")
CPUS_PER_GPU = (0, 1, 2)

SETUPS = (
    NOT_GIVEN,
    Value(profile='setup = ["module purge", "module load cuda/12.4 nccl", "ulimit -c 0"]'),
    Value(
        profile='setup = ["source /nowhere/conda.sh", ". \\"$HOME/venv\\"/bin/activate", "conda activate pt"]',
    ),
    Value(
        profile="""setup = ['export FROM_SETUP="a $((1 + 1)) \\"b\\""', "if true; then", "  umask 027", "fi"]""",
        exports={"FROM_SETUP": 'a 2 "b"'},
    ),
)
PROFILES = (
    NOT_GIVEN,
    Value(
        profile=f'fabric_interface = "ib0"\nsignal_lead_s = 300\nenv = {{ P = {json.dumps(TWO_LINES + PLAIN)} }}',
        exports={"P": TWO_LINES + PLAIN, "GLOO_SOCKET_IFNAME": "ib0"},
    ),
    Value(profile='sbatch = { nice = "7" }\ngrace_s = 30', reads={"nice": "7"}),
)
TIMES = [
    NOT_GIVEN,
    *(
        Value(("--time", typed), reads={"time": read})
        for typed, read in (
            ("1", "00:01:00"),
            ("90:30", "01:31:00"),
            ("4:00:00", "04:00:00"),
            ("2-0", "2-00:00:00"),
            ("1-12:30", "1-12:30:00"),
            ("6-23:59:59", "7-00:00:00"),
            ("UNLIMITED", "UNLIMITED"),
        )
    ),
]
NAMES = [
    NOT_GIVEN,
    *(
        Value((f"--name={typed}",), reads={"job-name": f"{read}-xxxxxx"})
        for typed, read in (
            ("GPT_7b.v2", "gpt-7b-v2"),
            ("-rf ../$(touch pwned)/%j", "rf-touch-pwned-j"),
            ("é 漢 \n", "run"),
            ("x" * 60, "x" * 40),
        )
    ),
]
PASSED = (
    NOT_GIVEN,
    passed("comment", PLAIN),
    passed("wckey", "a b"),
    Value(("--sbatch", "exclusive", "--sbatch", "--contiguous="),
          reads={"exclusive": "exclusive", "contiguous": "set"}),
    Value(("--sbatch", "mail_type=END,FAIL", "--sbatch", "mail-user=me+x@example.org"),
          reads={"mail-type": "END,FAIL", "mail-user": "me+x@example.org"}),
    passed("switches", "1@10:00", {"switches": "1@00:10:00"}),
    passed("licenses", f"{LICENSE}@{LICENSE_SERVER}:2"),
    passed("prefer", "ib&rack1"),
    passed("distribution", "block:cyclic"),
    passed("error", "e '%j'.log", {}),
    passed("kill-on-invalid-dep", "yes"),
    passed("begin", "now+1hour", {}),
    passed("container", "/oci/it's a bundle"),
)  # fmt: skip
# In the environment of the first run of a sweep.
SWEEPS = (
    NOT_GIVEN,
    Value(("--grid", "train.seed=1,2"), reads={"array": "0-1"}),
    Value(("--grid", f"env.S={json.dumps([PLAIN, 'b'])}", "--at-once", "1"),
          reads={"array": "0-1%1"}, exports={"S": PLAIN}),
    Value(("--grid", "train.log_every=1,5", "--grid", "train.seed=1,2", "--at-once", "3"), reads={"array": "0-3%3"}),
)  # fmt: skip


def _exported(**values: str) -> Value:
    """As in the [env] of a recipe: what --env gives is not in the script. JSON is TOML but for the DEL sign."""
    texts = {name: json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f") for name, value in values.items()}
    return Value(tuple(w for name, text in texts.items() for w in ("--set", f"env.{name}={text}")), exports=values)


ENVIRONMENT = [_exported(V=value) for value in HOSTILE]
MORE_ENVIRONMENT = (
    NOT_GIVEN,
    _exported(OMP_NUM_THREADS="3", TERM=""),
    _exported(NCCL_DEBUG="INFO", _A1="x=y="),
)

VALUES: Mapping[str, Sequence[Value]] = {
    "partition": given("partition", "low", "high", "high,low"),
    "account": given("account", "proj", PLAIN),
    "qos": given("qos", "normal", "it's 'high'"),
    "constraint": given("constraint", "ib", "ib&h100", "rack1|rack2", "[rack1|rack2]", "(ib&h100)|rack1"),
    "reservation": given("reservation", RESERVATION),
    "mem": [*given("mem", "100G", "64000"), Value(("--mem", "0"))],
    # Jobs that no testbed has had: what an ending one was would decide whether sbatch takes it.
    "dependency": given(
        "dependency",
        "singleton",
        "afterok:6000012",
        "afterany:6000001:6000002,afternotok:6000003",
        "afterok:6000001?afterany:6000002",
    ),
    "time": TIMES,
    "name": NAMES,
    "passed": PASSED,
    "setup": SETUPS,
    "environment": ENVIRONMENT,
    "more environment": MORE_ENVIRONMENT,
    "requeues": [
        NOT_GIVEN,
        Value(("--max-requeues", "0"), reads={"no-requeue": "no-requeue"}),
        Value(("--max-requeues", "3"), reads={"requeue": "requeue"}),
    ],
    "sweep": SWEEPS,
    "share": [NOT_GIVEN, Value(("--share",))],
    "checkpoints": [
        NOT_GIVEN,
        *(Value(("--checkpoint-dir", d)) for d in ("checks", "my checks/$(touch pwned) it's é")),
    ],
}
