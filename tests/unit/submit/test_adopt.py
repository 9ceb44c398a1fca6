"""What ``adopt`` makes of single lines of a batch script."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustertrain.errors import ClusterTrainError, UsageError
from clustertrain.submit.adopt.adoption import Adoption, adopt
from clustertrain.submit.adopt.program import Program, read_launcher
from clustertrain.submit.adopt.script_file import check_script
from tests.paths import ROOT

SCRIPTS = ROOT / "tests" / "fixtures" / "batch_scripts"
GPUS = "#SBATCH --nodes=2 --gpus-per-node=4\n"


def read(text: str) -> Adoption:
    return adopt(check_script(f"#!/bin/bash\n{text}".encode(), "job.sbatch"), "job.sbatch", "job", Path("/home/me"))


def command(text: str) -> str:
    return read(text).submit.partition(" -- ")[2]


def options(text: str) -> str:
    return read(text + "srun python train.py\n").submit.partition(" -- ")[0].removeprefix("clustertrain submit ")


@pytest.mark.parametrize(
    ("directives", "expected"),
    [
        ("#SBATCH -N2 -G 8\n", "--nodes 2 --gpus 4"),
        ("#SBATCH --nodes 2-2 --gpus-per-node=4\n", "--nodes 2 --gpus 4"),
        ("#SBATCH -n 16 --ntasks-per-node=8 --gpus-per-task=1\n", "--nodes 2 --gpus 8"),
        ("#SBATCH -N 1 -n 4 --gpus-per-task 1\n", "--nodes 1 --gpus 4"),
        ("#SBATCH -N 2 --gres=gpu\n", "--cluster job --nodes 2 --gpus 1"),
        ("#SBATCH -N 2 --gres=gpu:h100:4,tmpfs:10G\n", "--cluster job --nodes 2 --gpus 4 --sbatch gres=tmpfs:10G"),
        ("#SBATCH --gpus=16 --gpus-per-node=8\n", "--nodes 2 --gpus 8"),
        ("#SBATCH --nodes=2 --ntasks-per-gpu=1 --gpus-per-node=4 -c 3\n", "--cluster job --nodes 2 --gpus 4"),
        ("#SBATCH --nodes=8\n#SBATCH --nodes=2 --gpus-per-n=4\n", "--nodes 2 --gpus 4"),
        (f"{GPUS}#SBATCH --job-name='a b' # --mem=1G\n", "--nodes 2 --gpus 4 --name 'a b'"),
        (f"{GPUS}#SBATCH --exclusive=user --nice=-5\n", "--nodes 2 --gpus 4 --sbatch exclusive=user --sbatch nice=-5"),
        (f"{GPUS}#SBATCH --mem=0 --mem-per-gpu=5G\n", "--nodes 2 --gpus 4 --sbatch mem-per-gpu=5G"),
        (f"{GPUS}#SBATCH -D /proj\n", "--nodes 2 --gpus 4"),
        (f"#SBATCH --begin=now\n{GPUS}", "--nodes 2 --gpus 4 --sbatch begin=now"),
    ],
)
def test_directives_become_options(directives: str, expected: str) -> None:
    assert options(directives).rpartition("clustertrain submit ")[2] == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("srun python train.py", "python train.py"),
        ("srun -n 8 -l --gpus-per-task=1 python -m package.train --x=1", "python -m package.train --x=1"),
        ("time srun --export=ALL,A=1 env B=2 python train.py", "python train.py"),
        ("exec torchrun --standalone --nproc-per-node gpu train.py", "python train.py"),
        ("/env/bin/torchrun --nproc-per-node=4 --nnodes=2 -m package.train", "/env/bin/python -m package.train"),
        ("python -m torch.distributed.run --nproc_per_node 4 train.py a", "python train.py a"),
        ("python -O -W ignore -m torch.distributed.run --nproc_per_node 4 train.py a", "python train.py a"),
        ("python -Om package.train --x", "python -Om package.train --x"),
        ("strace -f torchrun --nproc-per-node 4 train.py", "strace -f python train.py"),
        ("trl sft --num_processes 8 --model x", "trl sft --num_processes 8 --model x"),
        ("srun uv run torchrun --nproc-per-node 4 train.py", "uv run python train.py"),
        ("srun uv run -m torch.distributed.run --nproc-per-node 4 train.py", "uv run python train.py"),
        ("srun numactl -l uv run --with torchrun python train.py", "numactl -l uv run --with torchrun python train.py"),
        ("srun env -u OMP_NUM_THREADS torchrun train.py", "env -u OMP_NUM_THREADS python train.py"),
        ("srun ch-run img -- python train.py", "ch-run img -- python train.py"),
        ("srun bash run.sh --x", "bash run.sh --x"),
        ("srun ./a.out", "./a.out"),
        ("./run.sh 1 2", "./run.sh 1 2"),
        ("X='a b'\nsrun python train.py $X \"$X\" '$X'", "python train.py a b 'a b' '$X'"),
        ("X=(a 'b c')\nX+=(d)\nsrun python train.py \"${X[@]}\" ${X[0]}", "python train.py a 'b c' d a"),
        ("X=1\nX=${X}2\nY=${X:-3}\nsrun python train.py $Y", "python train.py 12"),
        ("srun python train.py --nodes $SLURM_NNODES", "python train.py --nodes 2"),
        ("srun python train.py ~/data ${HOME}/x", "python train.py \"$HOME\"/data \"${HOME}\"/x"),
        ("srun python train.py data/*.bin {1..3}", "python train.py 'data/*.bin' '{1..3}'"),
        ("srun python train.py --id $SLURM_JOB_ID-$(date +%F)", "python train.py --id '$SLURM_JOB_ID'-'$(date +%F)'"),
        ("if x; then Y=1; fi\nsrun python train.py $Y", "python train.py '$Y'"),
        ("eval \"srun python train.py --a 'b c'\"", "python train.py --a 'b c'"),
        ("srun bash -c 'export RANK=$SLURM_PROCID; exec python train.py --x'", "python train.py --x"),
        ("module load x && srun python train.py || scontrol requeue $SLURM_JOB_ID", "python train.py"),
        ("exit_code=0\nsrun python train.py; exit $?\npython other.py", "python train.py"),
    ],
)  # fmt: skip
def test_training_command_is_found(text: str, expected: str) -> None:
    assert command(f"{GPUS}{text}\n") == expected


CONTAINERS = {
    "srun --container-image=nvcr.io#nvidia/pytorch:25.01 --container-mounts=/a:/b:ro,/c --no-container-mount-home "
    "torchrun train.py": "--container docker://nvcr.io/nvidia/pytorch:25.01 --container-mount /a:/b:ro "
    "--container-mount /c -- python train.py",
    "srun --container-image ubuntu:24.04 --container-mount-home python train.py":
        "--container docker://ubuntu:24.04 --container-mount '~' -- python train.py",
    "srun --container-image docker://host:5000/a/b --container-mounts $SCRATCH:/data python train.py":
        '--container docker://host:5000/a/b --container-mount "$SCRATCH":/data -- python train.py',
    "I=/img/t.sqsh\nsrun --container-image=$I --container-workdir=/w python train.py":
        "--container /img/t.sqsh -- python train.py",
    "srun --container=/bundle python train.py": "--container /bundle -- python train.py",
    "#SBATCH --container-image=./t.sqsh --container-mounts=/a\nsrun --container-mounts=/b python train.py":
        "--container ./t.sqsh --container-mount /a --container-mount /b -- python train.py",
    "#SBATCH --container=/b\nsrun python train.py": "--container /b -- python train.py",
    "srun apptainer exec --nv --bind /data img.sif torchrun --nproc-per-node 4 train.py":
        "--container img.sif --container-mount /data -- python train.py",
    "singularity -q exec -B/a:/b:ro,/c --env A=1 docker://x/y bash -c 'torchrun train.py --x'":
        "--container docker://x/y --container-mount /a:/b:ro --container-mount /c -- python train.py --x",
    "srun apptainer run img python train.py": "--container img -- python train.py",
    "export APPTAINER_BIND=/a,/b:/c\napptainer exec img python train.py":
        "--container img --container-mount /a --container-mount /b:/c -- python train.py",
    "export SINGULARITYENV_B_TOKEN=x\nsingularity exec img python train.py":
        '--container img --env B_TOKEN="$SINGULARITYENV_B_TOKEN" -- python train.py',
}  # fmt: skip


@pytest.mark.parametrize("text", CONTAINERS)
def test_container_of_the_program_is_the_run_s(text: str) -> None:
    submit = read(f"{GPUS}{text}\n").submit
    assert submit.partition("--gpus 4 ")[2] == CONTAINERS[text]


def test_what_differs_in_a_container_is_left_to_the_user() -> None:
    for text, detail in {
        "srun --container-image=/i --container-workdir=/w python t.py": "call submit in /w",
        "srun --container-image=me@host#a python t.py": "logs in to the registry with its own settings",
        "srun --container-image=$IMAGE python t.py": "needs docker:// before its name",
        "apptainer run img python t.py": "%runscript",
        "apptainer exec img bash -c 'pip install .; python t.py'": "the commands before it run on the node",
    }.items():
        assert any(detail in question.detail for question in read(f"{GPUS}{text}\n").questions), text
    profile = read(f"{GPUS}export APPTAINERENV_X=1\nsrun apptainer exec --env A=1 img python t.py\n").profile
    assert profile["env"] == {"X": "1", "A": "1"}
    unused = f"{GPUS}apptainer exec --overlay o img ls\nsrun python t.py\n"  # the set-up may do what submit cannot
    assert read(unused).profile["setup"] == ["apptainer exec --overlay o img ls"]


@pytest.mark.parametrize(
    ("text", "setup", "env"),
    [
        ("export A=1\nmodule load x\nexport B='2 3'", ["export A=1", "module load x"], {"B": "2 3"}),
        ("export NCCL_DEBUG=INFO\nmodule load x", ["module load x"], {"NCCL_DEBUG": "INFO"}),
        ("export P=/p\nexport PATH=$P/bin:$PATH", ["export P=/p", "export PATH=$P/bin:$PATH"], {}),
        ("D=/d\nsource $D/env.sh", ["D=/d", "source $D/env.sh"], {}),
        ("unused=1\nulimit -n 4096", ["ulimit -n 4096"], {}),
        ("export RANK=0 MASTER_PORT=1 A=1", [], {"A": "1"}),
        ("export -f f", ["export -f f"], {}),
        ("set -euxo pipefail", ["set -euo pipefail"], {}),
        ("set -x", [], {}),
        ("source env.sh", ["cd /home/me", "source env.sh"], {}),
        ("cd /data\nsource env.sh", ["cd /data", "source env.sh"], {}),
        ("[ -d /x ] || exit 1", ["[ -d /x ] || exit 1"], {}),
        ("module load a \\\n   b", ["module load a b"], {}),
        ("cat > /x <<EOF\na\n\nb\nEOF", ["cat > /x <<EOF", "a", "", "b", "EOF"], {}),
        ("A=1 B=$C srun hostname", [], {}),
        ("echo a; date; nvidia-smi", [], {}),
        ("python prepare.py", ["cd /home/me", "python prepare.py"], {}),
    ],
)  # fmt: skip
def test_set_up_keeps_its_order(text: str, setup: list[str], env: dict[str, str]) -> None:
    profile = read(f"{GPUS}{text}\nsrun python train.py\n").profile
    assert (profile.get("setup", []), profile.get("env", {})) == (setup, env)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("srun python a.py\nsrun python b.py", "several training commands, on lines 3, 4"),
        ("for i in 1 2; do\n  srun python a.py\ndone", "line 4: the training command is inside the block `for`"),
        ("if true; then srun python a.py; fi", "line 3: the training command is inside the block `if`"),
        ("run() {\n  torchrun a.py\n}\nrun", "line 4: the training command is inside the block `function run`"),
        ("srun --container-image=x --container-name=y python a.py", "line 3: srun --container-name: cannot be honored"),
        ("srun --container-image=x --container-mounts=/a:/b:x=d python a.py", "--container-mounts: '/a:/b:x=d'"),
        ("srun --container-image=dockerd://x python a.py", "dockerd:// is a store of one machine"),
        ("srun apptainer exec --overlay o img python a.py", "line 3: apptainer --overlay: cannot be honored"),
        ("srun singularity exec library://a/b python a.py", "not an image that submit takes"),
        ("srun podman run --rm -v /a:/a img torchrun a.py --x", "line 3: podman: its command line is not translated"),
        ("docker run --gpus all img python a.py", "line 3: docker: its command line is not translated"),
        ("srun ch-run img -- torchrun a.py", "line 3: ch-run: its command line is not translated"),
        ("srun apptainer exec img.sif accelerate launch a.py", "line 3: accelerate launch in a container"),
        ("srun --frobnicate x python a.py", "line 3: srun --frobnicate: an option that clustertrain does not know"),
        ("srun --multi-prog x.conf", "line 3: srun --multi-prog: several programs"),
        ("torchrun --nproc-per-node 4 --virtual-local-rank a.py", "line 3: torchrun --virtual-local-rank"),
        ("torchrun $1 a.py", "line 3: torchrun: what stands before the program"),
        ("torchrun", "line 3: torchrun: no program"),
        ("mpirun --frobnicate python a.py", "line 3: mpirun --frobnicate"),
        ("deepspeed --frobnicate a.py", "line 3: deepspeed --frobnicate"),
        ("uv run accelerate launch a.py", "line 3: accelerate launch behind uv"),
        ("srun uvx torchrun a.py", "line 3: torchrun behind uvx"),
        ("hatch run test:torchrun a.py", "line 3: hatch run test:torchrun"),
        ("axolotl train c.yml", "line 3: axolotl train: clustertrain starts the processes itself"),
        ("A=x\n" + "A=$A$A\n" * 40 + "srun python $A", "16 million characters"),
        ("f(x)", "line 3: a parenthesis ( inside a command"),
    ],
)  # fmt: skip
def test_what_cannot_be_translated_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError) as e:
        read(f"{GPUS}{text}\n")
    assert message in str(e.value) and e.value.fix
    assert ("clustertrain wrap" in e.value.fix) == ("training command" in message)  # which a script may keep


@pytest.mark.parametrize(
    ("directive", "message"),
    [
        ("--time=tomorrow", "line 2: --time=tomorrow: not in a format that sbatch accepts"),
        ("--nodes=many", "line 2: --nodes=many: not a positive number"),
        ("--gres=gpu:a:1,gpu:b:1", "GPUs of several types"),
        ("--gpus-per-node=a100:2,v100:2", "not a number of GPUs of one type"),
        ("--job-name", "the value is missing"),
        ("-y", "not an option of sbatch"),
        ("--job-name='x", "a quote is not closed"),
        ("job.sh", "'job.sh' is not an option"),
        ("hetjob", "a heterogeneous job"),
        ("--container-id=7", "--container-id=7: cannot be honored"),
        ("--signal=@@", "not in a format that sbatch accepts"),
    ],
)
def test_directives_that_cannot_be_honored_are_refused(directive: str, message: str) -> None:
    with pytest.raises(UsageError) as e:
        read(f"#SBATCH {directive}\nsrun python train.py\n")
    assert message in str(e.value) and e.value.fix


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        (f"{GPUS}python train.py", "the script starts one process for 8 GPUs"),
        (f"{GPUS}srun --ntasks-per-node=1 python train.py", "the script starts 1 process per node for 4 GPUs"),
        (f"{GPUS}srun torchrun --nproc-per-node=2 train.py", "torchrun starts 2 ranks on nodes with 4 GPUs"),
        (f"{GPUS}srun -N1 torchrun --nproc-per-node=4 train.py", "the job has 2 nodes, and the command uses 1"),
        ("#SBATCH -N 1-3 --gpus-per-node=1\nsrun python train.py", "a run has a fixed number of nodes: 1 is taken"),
        (f"{GPUS}#SBATCH --signal=CONT\nsrun python train.py", "handles CONT itself gets SIGTERM instead"),
        (f"{GPUS}#SBATCH --new-option=1\nsrun python train.py", "clustertrain does not know this option"),
        (f"{GPUS}cd $TMPDIR/$SLURM_JOB_ID\nsrun python train.py", "let the program change to this folder"),
        (f"{GPUS}export X=$SCRATCH/$SLURM_PROCID\nsrun python train.py", "$SLURM_PROCID has another value, or none"),
        (f"{GPUS}srun python train.py\npython evaluate.py", "a run executes nothing after it"),
        (f"{GPUS}sbatch other.sbatch\nsrun python train.py", "submits another job"),
        (f"{GPUS}A=$B srun python train.py", "set before the command"),
        (f"{GPUS}srun python train.py < input.txt", "ranks read nothing from standard input"),
    ],
)
def test_differences_are_left_to_the_user(text: str, detail: str) -> None:
    assert any(detail in question.detail for question in read(f"{text}\n").questions)


@pytest.mark.parametrize(
    ("signal", "option"),
    [("USR1@90", "--stop-signal USR1"), ("sigusr2", "--stop-signal USR2"), ("10@5", "--stop-signal USR1"),
     ("TERM@30", ""), ("B:USR1@90", "")],
)  # fmt: skip
def test_signal_for_the_processes_is_the_stop_signal(signal: str, option: str) -> None:
    adoption = read(f"{GPUS}#SBATCH --signal={signal}\nsrun python train.py\n")
    assert ("--stop-signal" in adoption.submit) == bool(option) and option in adoption.submit


def test_secrets_are_shown_nowhere() -> None:
    directives = f"{GPUS}#SBATCH --export=ALL,A_TOKEN=abc\n"
    adoption = read(f"{directives}export B_KEY='abc'\nC_PASSWORD=abc srun --export=ALL,D_SECRET=abc python t.py\n")
    assert "abc" not in repr(adoption)
    assert all(f'--env {name}="${name}"' in adoption.submit for name in ("A_TOKEN", "B_KEY", "C_PASSWORD", "D_SECRET"))


def test_directives_end_at_the_first_command() -> None:
    adoption = read(
        f"{GPUS}\n# a comment\n#SBATCH --mem=1G\necho\n#SBATCH --time=1\n # SBATCH -p x\nsrun python t.py\n"
    )
    assert "--mem 1G" in adoption.submit and "--time" not in adoption.submit
    details = {outcome.line: outcome.detail for outcome in adoption.outcomes}
    assert details[7] == "sbatch reads no directives after the first command, on line 6"
    assert "only #SBATCH starts a directive" in details[8]


FRAGMENTS = [
    "#!/bin/bash", "#SBATCH", "--nodes=", "--gres=gpu:", "srun", "torchrun", "python", "train.py", "bash -c", "eval",
    "export", "A=", "(", ")", "{", "}", "[[", "]]", "$A", "${A", "$(", "`", "'", '"', "\\", "<<EOF", "EOF", "if",
    "then", "fi", "for", "do", "done", "case", "esac", "in", ";;", "&&", "|", "||", ";", "&", ">", "<(", "~", "*",
    "function", "f()", "A+=(", "${A[@]}", "$((", "accelerate launch", "deepspeed", "mpirun", "-x", "trap",
    "scontrol requeue", "cd", "source", "exit", "timeout 1h", "-m", "--", "=", "\n", "\t", " ", "\x1b", "é",
    "\ue0000\ue001",
]  # fmt: skip
TEXTS = st.one_of(
    st.text(),
    st.lists(st.sampled_from(FRAGMENTS)).map(" ".join),
    st.lists(st.sampled_from(FRAGMENTS)).map("".join),
    st.builds(
        lambda script, at, length, fragment: script[:at] + fragment + script[at + length :],
        st.sampled_from([path.read_text() for path in sorted(SCRIPTS.iterdir())]),
        st.integers(0, 1500),
        st.integers(0, 40),
        st.sampled_from(FRAGMENTS),
    ),
)


@pytest.mark.long
@given(TEXTS)
def test_arbitrary_text_raises_only_errors_for_the_user(text: str) -> None:
    try:
        adoption = read(text if not text.startswith("#!") else f"\n{text}")
    except ClusterTrainError as e:
        assert "\ue000" not in str(e)
        return
    assert adoption.submit and "\ue000" not in adoption.submit + adoption.profile_text


@pytest.mark.parametrize(
    ("command", "expected", "is_asked"),
    [
        ("deepspeed --num_gpus 8 --module pkg.train -x", "deepspeed --module pkg.train -x", False),
        ("deepspeed --no_local_rank --num_gpus 8 train.py", "python train.py", False),
        ("python -m torch.distributed.launch --nnodes 2 t.py", "python -m torch.distributed.launch t.py", False),
        ("python -m torch.distributed.launch --use_env t.py", "python t.py", False),
        ("uv run deepspeed --num_gpus 8 train.py", "uv run python train.py", True),
    ],
)
def test_launcher_that_passes_the_local_rank_stays(command: str, expected: str, is_asked: bool) -> None:
    program = Program(command.split())
    read_launcher(program)
    assert " ".join(program.words) == expected
    assert any("LOCAL_RANK is in the environment" in warning for warning in program.warnings) == is_asked
