"""``accelerate launch`` and ``trl``: options and configuration as the environment that they would give the ranks.

accelerate itself reads them, in the Python beside it, so every option of the installed version counts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from clustertrain import proc, schema
from clustertrain.errors import CommandFailed, UsageError
from clustertrain.plan.layout import pluralize
from clustertrain.submit.launchers.launch import Launch, note_unused
from clustertrain.submit.request import SubmitRequest

_MISSING = re.compile(r"No module named '([\w.]+)'")
_TIMEOUT_S = 300.0  # importing torch from a shared filesystem may take minutes
# accelerate 1.10 to 1.15: launch_command without its last step, which starts the processes. trl calls it too.
_PROGRAM = """
import importlib.util, json, os, sys
from accelerate.commands import launch
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

before = dict(os.environ)


def answer(args):
    given = {"nodes": args.num_machines, "processes": args.num_processes}
    args, defaults, has_precision = launch._validate_launch_command(args)
    if defaults is not None:  # a configuration file; otherwise the numbers are those of this machine
        given = {"nodes": args.num_machines, "processes": args.num_processes}
    if args.tpu or getattr(args, "mpirun_hostfile", None):
        sys.exit("--tpu and --mpirun_hostfile start other launchers")
    args.main_process_port, args.machine_rank = 0, 0
    gpu_ids = args.gpu_ids if args.gpu_ids != "all" else None
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
        **given, "has_config": defaults is not None, "is_cpu": bool(args.cpu or args.use_cpu), "gpu_ids": gpu_ids,
        "is_module": bool(args.module), "is_program": bool(args.no_python),
        "program": [args.training_script, *args.training_script_args],
    }, sys.stdout)
    sys.exit()


def parse_without_classes(self, args=None, return_remaining_strings=False, **options):
    # The classes of arguments check the GPUs, which this machine may lack; trl needs only what they leave.
    if not (self.dataclass_types and return_remaining_strings):
        return parse(self, args, return_remaining_strings=return_remaining_strings, **options)
    return (*(None for _ in self.dataclass_types), self.parse_known_args(args)[1])


name, *arguments = sys.argv[1:]
if name == "trl":
    if importlib.util.find_spec("trl.scripts." + arguments[0]) is None:
        sys.exit(f"{arguments[0]} is not a training command of this trl")
    launch.launch_command = answer
    from trl.scripts.utils import TrlParser
    parse = TrlParser.parse_args_into_dataclasses
    TrlParser.parse_args_into_dataclasses = parse_without_classes
    from trl.cli import main
    sys.argv = [name, *arguments]
    main()
    sys.exit(f"{arguments[0]} did not call accelerate launch")
answer(launch.launch_command_parser().parse_args(arguments))
"""


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What the program prints."""

    env: dict[str, str]
    nodes: int | None
    processes: int | None
    has_config: bool
    is_cpu: bool
    gpu_ids: str | None
    is_module: bool
    is_program: bool
    program: list[str]


_UNUSED = frozenset({
    "main-process-ip", "main-process-port", "machine-rank", "same-network", "rdzv-backend", "rdzv-conf", "max-restarts",
    "monitor-interval", "log-dir", "tee", "role",
})  # fmt: skip
# Set by clustertrain: the ranks' places, ports and devices.
_OWN = frozenset({"CUDA_VISIBLE_DEVICES", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK"})


def read_accelerate(request: SubmitRequest, name: str, python: str, arguments: Sequence[str]) -> Launch:
    """Return what ``accelerate launch`` or ``trl`` would start.

    Args:
        name: ``accelerate launch``, or ``trl``, whose training commands are accelerate launch with a script of trl.

    Raises:
        UsageError: it refuses the arguments, cannot be imported, or its processes cannot be divided among the nodes.
    """
    shown = f"trl {arguments[0]}" if name == "trl" else name
    answer = _ask(request, name, shown, python, arguments)
    nodes, processes = answer.nodes or 1, answer.processes
    sizes = {"nnodes": str(answer.nodes)} if answer.nodes else {}
    origin = "the accelerate configuration" if answer.has_config else shown
    if processes and processes % nodes:
        raise UsageError(
            f"{origin}: {processes} processes cannot be divided among {nodes} nodes",
            fix="give --num_processes, the number on all nodes together, and --num_machines that fit",
        )
    if processes:
        sizes["nproc-per-node"] = str(processes // nodes)
    elif not answer.is_cpu:
        sizes["nproc-per-node"] = "gpu"  # accelerate's default: all GPUs of the node
    source = f"{origin}: {pluralize(processes or 0, 'process')} on {pluralize(nodes, 'node')}"
    start = [] if answer.is_program else [python, *(["-m"] if answer.is_module else [])]
    unused = _list_unused(arguments[: len(arguments) - len(answer.program)] if name != "trl" else arguments)
    if answer.gpu_ids is not None:
        unused.append("gpu-ids")
    return Launch(
        [*start, *answer.program],
        sizes,
        {name: value for name, value in answer.env.items() if name not in _OWN},
        source=f"{source}, {processes // nodes} per node" if processes and nodes > 1 else source,
        fix="leave the option out, or let --num_processes and --num_machines of accelerate say the same",
        notes=tuple(note_unused(shown, unused)),
    )


def _ask(request: SubmitRequest, name: str, shown: str, python: str, arguments: Sequence[str]) -> _Answer:
    environ = {**request.environ, "ACCELERATE_LOG_LEVEL": "ERROR"}
    try:
        result = proc.run(
            [python, "-c", _PROGRAM, name, *arguments],
            env=environ, cwd=request.cwd, timeout_s=_TIMEOUT_S, check=False,
        )  # fmt: skip
    except (CommandFailed, OSError) as e:
        raise UsageError(
            f"{shown}: {python} does not run here, or took longer than {_TIMEOUT_S:g} s to read the options",
            fix="name the Python of an environment that works on this machine",
        ) from e
    if result.returncode:
        raise _refusal(shown, python, result.stderr)
    try:
        return schema.decode(result.stdout.strip().rpartition("\n")[2], _Answer)
    except msgspec.DecodeError as e:
        raise _refusal(shown, python, f"its answer is not JSON: {result.stdout[:200]!r}") from e


def _list_unused(arguments: Sequence[str]) -> list[str]:
    """Return the options of accelerate in ``arguments`` that have no effect here."""
    words = [word.partition("=")[0].removeprefix("--") for word in arguments if word.startswith("--")]
    return [name for word in words if (name := word.replace("_", "-")) in _UNUSED]


def _refusal(shown: str, python: str, output: str) -> UsageError:
    lines = output.strip().splitlines()
    if lines and (missing := _MISSING.search(lines[-1])):
        return UsageError(
            f"{shown}: {python} has no {missing[1]}",
            fix="install it in this environment, or activate the one that has it",
        )
    return UsageError(
        f"{shown}: {lines[-1] if lines else 'no answer'}",
        fix=f"see {shown} --help, or name the script without {shown.partition(' ')[0]}",
    )
