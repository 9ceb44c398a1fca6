"""``accelerate launch``: its options and configuration as the environment that it would give the ranks.

accelerate itself reads them, in the Python beside it, so every option of the installed version counts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from clustertrain import proc, schema
from clustertrain.errors import CommandFailed, UsageError
from clustertrain.submit.request import SubmitRequest

_MISSING = re.compile(r"No module named '([\w.]+)'")
_TIMEOUT_S = 300.0  # importing torch from a shared filesystem may take minutes
# accelerate 1.10 to 1.15: launch_command without its last step, which starts the processes.
_PROGRAM = """
import json, os, sys
from accelerate.commands import launch
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

args = launch.launch_command_parser().parse_args(sys.argv[1:])
given = {"nodes": args.num_machines, "processes": args.num_processes}
args, defaults, has_precision = launch._validate_launch_command(args)
if defaults is not None:  # a configuration file; otherwise the numbers are those of this machine
    given = {"nodes": args.num_machines, "processes": args.num_processes}
if args.tpu or getattr(args, "mpirun_hostfile", None):
    sys.exit("--tpu and --mpirun_hostfile start other launchers")
args.main_process_port, args.machine_rank = 0, 0
before = dict(os.environ)
if args.use_deepspeed and not args.cpu:
    fields = [*(defaults.deepspeed_config if defaults else ()), *(["mixed_precision"] if has_precision else ())]
    args.deepspeed_fields_from_accelerate_config = ",".join(fields)
    args.deepspeed_multinode_launcher = "standard"
    env = prepare_deepspeed_cmd_env(args)[1]
elif (args.use_fsdp or args.use_megatron_lm or args.multi_gpu) and not args.cpu:
    env = prepare_multi_gpu_env(args)
else:
    args.num_machines = 1  # with more it asks for an address, which our launch sets
    env = prepare_simple_launcher_cmd_env(args)[1]
json.dump({
    "env": {name: value for name, value in env.items() if before.get(name) != value},
    **given, "is_module": bool(args.module), "is_program": bool(args.no_python),
    "program": [args.training_script, *args.training_script_args],
}, sys.stdout)
"""


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What the program prints."""

    env: dict[str, str]
    nodes: int | None
    processes: int | None
    is_module: bool
    is_program: bool
    program: list[str]


# Set by clustertrain: the ranks' places, ports and devices.
_OWN = frozenset({"CUDA_VISIBLE_DEVICES", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK"})


def read_accelerate(
    request: SubmitRequest, python: str, arguments: Sequence[str]
) -> tuple[dict[str, str], dict[str, str], list[str]]:
    """Return the environment of the ranks, the sizes as torchrun's options, and the command of a rank.

    Raises:
        UsageError: accelerate refuses the arguments or cannot be imported.
    """
    environ = {**request.environ, "ACCELERATE_LOG_LEVEL": "ERROR"}
    try:
        result = proc.run(
            [python, "-c", _PROGRAM, *arguments], env=environ, cwd=request.cwd, timeout_s=_TIMEOUT_S, check=False
        )
    except CommandFailed as e:
        raise _refusal(python, str(e)) from e
    if result.returncode:
        raise _refusal(python, result.stderr)
    try:
        answer = schema.decode(result.stdout.rpartition("\n")[2], _Answer)
    except msgspec.DecodeError as e:
        raise _refusal(python, f"its answer is not JSON: {result.stdout[:200]!r}") from e
    env = {name: value for name, value in answer.env.items() if name not in _OWN}
    sizes = {}
    if answer.nodes:
        sizes["nnodes"] = str(answer.nodes)
    if answer.processes:
        sizes["nproc-per-node"] = str(max(1, answer.processes // (answer.nodes or 1)))
    start = [] if answer.is_program else [python, *(["-m"] if answer.is_module else [])]
    return env, sizes, [*start, *answer.program]


def _refusal(python: str, output: str) -> UsageError:
    lines = output.strip().splitlines()
    if lines and (missing := _MISSING.search(lines[-1])):
        return UsageError(
            f"accelerate launch: {python} has no {missing[1]}",
            fix="install it in this environment, or activate the one that has it",
        )
    return UsageError(
        f"accelerate launch: {lines[-1] if lines else 'no answer'}",
        fix=f"see {python} -m accelerate.commands.launch --help, or name the script without accelerate launch",
    )
