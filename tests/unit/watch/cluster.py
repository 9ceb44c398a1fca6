"""A fake cluster for `watch`: Slurm's answers, and an srun that starts the tasks of a step on this machine."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from clustertrain import fsio
from tests.fakes.slurm.fixture import FakeSlurm

JOB, SUBMITTED, STARTED = "7", 1_795_913_000, 1_795_913_100

# As srun does with --label and --input=all. A task ends with its node's name in `broken`.
_SRUN = """#!{python} -I
import concurrent.futures, json, os, subprocess, sys, threading
with open({calls!r}, "a") as f:
    f.write(json.dumps(sys.argv[1:]) + "\\n")
options = dict(a.partition("=")[::2] for a in sys.argv[1:] if a.startswith("--"))
refusal = {refusal!r}
if refusal:
    sys.stderr.write(refusal)
    sys.exit(1)
command = sys.argv[sys.argv.index("/bin/sh"):]
tasks = []
def copy(number, stream, target):
    for line in stream:
        target.write(f"{{number}}: ".encode() + line)
        target.flush()
threads = []
for number, node in enumerate(options["--nodelist"].split(",")):
    env = {{**os.environ, "SLURMD_NODENAME": node, "SLURM_PROCID": str(number), "SLURM_STEP_ID": "3"}}
    argv = list(command)
    if node in {broken!r}:  # another Python, in which clustertrain is not installed
        argv[3:] = ["/bin/sh", "-c", "echo Traceback >&2; echo ImportError: no luck >&2; exit 1"]
    child = subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    tasks.append(child)
    for stream, target in ((child.stdout, sys.stdout.buffer), (child.stderr, sys.stderr.buffer)):
        threads.append(threading.Thread(target=copy, args=(number, stream, target)))
        threads[-1].start()
def forward():
    while data := os.read(0, 4096):
        for child in tasks:
            try:
                child.stdin.write(data), child.stdin.flush()
            except OSError:
                pass
    for child in tasks:
        try:
            child.stdin.close()
        except OSError:
            pass
threading.Thread(target=forward, daemon=True).start()
def wait(number, node):
    code = tasks[number].wait()
    if code:
        sys.stderr.write(f"srun: error: {{node}}: task {{number}}: Exited with exit code {{code}}\\n")
        sys.stderr.flush()
    return code
with concurrent.futures.ThreadPoolExecutor() as pool:
    code = max(pool.map(wait, range(len(tasks)), options["--nodelist"].split(",")))
for thread in threads:
    thread.join()
os._exit(code)
"""

# The values of the job by the fields that are asked for; no line if the job is not known any more.
_SQUEUE = """#!{python} -I
import json, pathlib, sys
values = json.loads(pathlib.Path({answer!r}).read_text())
(fields,) = [a.partition("=")[2] for a in sys.argv if a.startswith("--Format=")]
if values is None:
    sys.exit("slurm_load_jobs error: Invalid job id specified")
print("".join(values[field.partition(":")[0]] + "|" for field in fields.split(",")))
"""


@dataclass(frozen=True)
class FakeCluster:
    """A job on two nodes, as Slurm shows it."""

    slurm: FakeSlurm

    def set_job(self, state: str, *, restart: int = 0, uid: int | None = None, reason: str = "None") -> None:
        owner = str(os.geteuid() if uid is None else uid)
        is_running = state == "RUNNING"
        self._write_queue(
            {
                "JobArrayID": JOB, "JobID": JOB, "State": state, "UserID": owner, "UserName": "amy",
                "RestartCnt": str(restart), "SubmitTime": str(SUBMITTED), "StartTime": str(STARTED + restart),
                "EndTime": "N/A", "HetJobID": "N/A", "Reason": reason, "PreemptTime": "N/A",
                "NodeList": "node[01-02]" if is_running else "",
            }
        )  # fmt: skip
        groups = "     Nodes=node[01-02] CPU_IDs=0-3 Mem=8000 GRES=gpu:h100:2(IDX:0-1)\n"
        text = f"JobId={JOB} JobName=own train\n{groups}   Command=/home/amy/train.sh\n   WorkDir=/home/amy\n"
        self.slurm.answers("scontrol", stdout=text)

    def forget_job(self) -> None:
        """Let Slurm no longer know the job."""
        self._write_queue(None)

    def _write_queue(self, values: dict[str, str] | None) -> None:
        answer = self.slurm.folder / "squeue.values"
        fsio.write_json(answer, values)
        command = self.slurm.folder / "squeue"
        if "squeue.values" not in command.read_text():
            command.write_text(_SQUEUE.format(python=sys.executable, answer=str(answer)))

    def set_accounting(self, *states: str) -> None:
        lines = [f"{JOB}|{s}|{STARTED + i}|{STARTED + 60 + i}|node[01-02]|0:0|None\n" for i, s in enumerate(states)]
        self.slurm.answers("sacct", stdout="".join(lines))

    def set_srun(self, *, refusal: str = "", broken: tuple[str, ...] = ()) -> None:
        path = self.slurm.folder / "srun"
        calls = str(self.slurm.folder / "srun.argv")
        path.write_text(_SRUN.format(python=sys.executable, calls=calls, refusal=refusal, broken=broken))
        path.chmod(0o755)

    @property
    def home(self) -> Path:
        return Path(os.environ["CLUSTERTRAIN_HOME"])
