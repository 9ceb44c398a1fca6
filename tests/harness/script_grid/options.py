"""The options of `submit` with their values, and the effect that each value must have on the job."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# tests/slurm creates these on the testbed.
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
# Without control characters, which a directive cannot contain.
PLAIN = "a b'\"$(touch pwned)`touch pwned`\\ é #x;&|"


@dataclass(frozen=True)
class Value:
    """One value of an option.

    Attributes:
        args: arguments of the command.
        profile: lines of the cluster profile.
        reads: options that sbatch must parse, with their values.
        exports: variables that the job's environment must contain.
    """

    args: tuple[str, ...] = ()
    profile: str = ""
    reads: Mapping[str, str] = field(default_factory=dict)
    exports: Mapping[str, str] = field(default_factory=dict)


ABSENT = Value()


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


def option_values(option: str, *values: str) -> list[Value]:
    """Return the absent option and each of ``values``, which sbatch must parse unchanged."""
    return [ABSENT, *(Value((f"--{option}", value), reads={option: value}) for value in values)]


def sbatch_option(key: str, value: str, reads: Mapping[str, str] | None = None) -> Value:
    """Return a value that is passed with --sbatch."""
    return Value(("--sbatch", f"{key}={value}"), reads={key: value} if reads is None else reads)


def host_selection(where: str, nodes: int) -> Value:
    """Return a selection of hosts: as many as the job has nodes, which --test-only of 22.05 requires."""
    listed = f"node[01-{nodes:02}]"
    chosen = Value(("--nodelist", listed), reads={"nodelist": listed}) if "listed" in where else ABSENT
    if "excluded" not in where or nodes == 4:
        return chosen
    excluded = Value(("--exclude", "node04"), reads={"exclude": "node04"})
    return Value((*chosen.args, *excluded.args), reads={**chosen.reads, **excluded.reads})


HOST_SELECTIONS = ("", "listed", "excluded", "listed and excluded")
# Device and GPU type.
DEVICES = (("", ""), ("", "h100"), ("cuda", "h100"), ("cpu", ""), ("cpu", "h100"))
GPUS_FLAGS = ("gpus-per-node", "gres")
CPUS_PER_GPU = (0, 1, 2)

SETUPS = (
    ABSENT,
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
    ABSENT,
    Value(
        profile=f'fabric_interface = "ib0"\nsignal_lead_s = 300\nenv = {{ P = {json.dumps(TWO_LINES + PLAIN)} }}',
        exports={"P": TWO_LINES + PLAIN, "GLOO_SOCKET_IFNAME": "ib0"},
    ),
    Value(profile='sbatch = { nice = "7" }\ngrace_s = 30', reads={"nice": "7"}),
)
TIMES = [
    ABSENT,
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
    ABSENT,
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
SBATCH_OPTIONS = (
    ABSENT,
    sbatch_option("comment", PLAIN),
    sbatch_option("wckey", "a b"),
    Value(("--sbatch", "exclusive", "--sbatch", "--contiguous="),
          reads={"exclusive": "exclusive", "contiguous": "set"}),
    Value(("--sbatch", "mail_type=END,FAIL", "--sbatch", "mail-user=me+x@example.org"),
          reads={"mail-type": "END,FAIL", "mail-user": "me+x@example.org"}),
    sbatch_option("switches", "1@10:00", {"switches": "1@00:10:00"}),
    sbatch_option("licenses", f"{LICENSE}@{LICENSE_SERVER}:2"),
    sbatch_option("prefer", "ib&rack1"),
    sbatch_option("distribution", "block:cyclic"),
    sbatch_option("error", "e '%j'.log", {}),
    sbatch_option("kill-on-invalid-dep", "yes"),
    sbatch_option("begin", "now+1hour", {}),
    sbatch_option("container", "/oci/it's a bundle"),
)  # fmt: skip
# ``exports`` is the environment of a sweep's first run.
SWEEPS = (
    ABSENT,
    Value(("--grid", "train.seed=1,2"), reads={"array": "0-1"}),
    Value(("--grid", f"env.S={json.dumps([PLAIN, 'b'])}", "--at-once", "1"),
          reads={"array": "0-1%1"}, exports={"S": PLAIN}),
    Value(("--grid", "train.log_every=1,5", "--grid", "train.seed=1,2", "--at-once", "3"), reads={"array": "0-3%3"}),
)  # fmt: skip


def _exported(**values: str) -> Value:
    """Return variables set with --set, because those of --env are not in the script; JSON is TOML except for DEL."""
    texts = {name: json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f") for name, value in values.items()}
    return Value(tuple(w for name, text in texts.items() for w in ("--set", f"env.{name}={text}")), exports=values)


ENVIRONMENT = [_exported(V=value) for value in HOSTILE]
MORE_ENVIRONMENT = (
    ABSENT,
    _exported(OMP_NUM_THREADS="3", TERM=""),
    _exported(NCCL_DEBUG="INFO", _A1="x=y="),
)

VALUES: Mapping[str, Sequence[Value]] = {
    "partition": option_values("partition", "low", "high", "high,low"),
    "account": option_values("account", "proj", PLAIN),
    "qos": option_values("qos", "normal", "it's 'high'"),
    "constraint": option_values("constraint", "ib", "ib&h100", "rack1|rack2", "[rack1|rack2]", "(ib&h100)|rack1"),
    "reservation": option_values("reservation", RESERVATION),
    "mem": [*option_values("mem", "100G", "64000"), Value(("--mem", "0"))],
    # Job ids that the testbed never had: the state of existing jobs would affect whether sbatch accepts them.
    "dependency": option_values(
        "dependency",
        "singleton",
        "afterok:6000012",
        "afterany:6000001:6000002,afternotok:6000003",
        "afterok:6000001?afterany:6000002",
    ),
    "time": TIMES,
    "name": NAMES,
    "passed": SBATCH_OPTIONS,
    "setup": SETUPS,
    "environment": ENVIRONMENT,
    "more environment": MORE_ENVIRONMENT,
    "requeues": [
        ABSENT,
        Value(("--max-requeues", "0"), reads={"no-requeue": "no-requeue"}),
        Value(("--max-requeues", "3"), reads={"requeue": "requeue"}),
    ],
    "sweep": SWEEPS,
    "share": [ABSENT, Value(("--share",))],
    "checkpoints": [
        ABSENT,
        *(Value(("--checkpoint-dir", d)) for d in ("checks", "my checks/$(touch pwned) it's é")),
    ],
}
