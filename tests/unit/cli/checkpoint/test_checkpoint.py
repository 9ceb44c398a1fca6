"""``clustertrain checkpoint``, as it is called."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from clustertrain import clock
from clustertrain.checkpoint.format import manifest as index
from clustertrain.checkpoint.format.manifest import CheckpointMetric
from clustertrain.checkpoint.load import rollback
from clustertrain.checkpoint.load.rollback import RollbackTarget
from clustertrain.checkpoint.offline import inspect
from clustertrain.cli import progress
from clustertrain.report import terminal
from tests.unit.checkpoint.saved import change_index, decoder, make_run, recipe_of, save
from tests.unit.cli.checkpoint.conftest import Command, flip, folder_of

# -- list


def test_list_reads_no_data_unless_asked(run: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    original = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *args: read.append(1) or original(*args))
    quick = command("list", "net", "--json").json["checkpoints"]
    assert (read, [r["verified"] for r in quick]) == ([], [None, None])
    keys = {"step", "path", "bytes", "new_bytes", "committed", "verified", "engine", "layout", "world_size", "metric"}
    keys |= {"best", "damage", "unreadable"}
    assert set(quick[0]) == keys
    lines = command("list", "net").out.splitlines()
    assert [line.split() for line in lines] == [
        ["step", "size", "ranks", "layout", "engine", "state"],
        *(["3", *lines[1].split()[1:3], "1", "single", "raw", "committed"], lines[2].split()),
    ]
    assert [line.split()[-1] for line in lines[1:]] == ["committed", "committed"]
    whole = command("list", "net", "--verify", "--json").json["checkpoints"]
    assert ([r["verified"] for r in whole], bool(read), set(whole[0])) == ([True, True], True, keys)


def test_list_counts_shared_files_once(run: Path, command: Command) -> None:
    model = torch.nn.Linear(1000, 1000, bias=False).requires_grad_(False)
    for step in (9, 12):
        save(run / "checkpoints", step, {"model": model, "step": torch.tensor(step)})
    lines = [line.split() for line in command("list", "net").out.splitlines()]
    assert lines[0] == ["step", "size", "new", "ranks", "layout", "engine", "state"]
    assert lines[3][:5] == ["9", "3.8", "MiB", "3.8", "MiB"] and lines[4][:3] == ["12", "3.8", "MiB"]
    rows = command("list", "net", "--json").json["checkpoints"]
    assert rows[3]["new_bytes"] < rows[3]["bytes"] / 100
    assert command("list", "net@12", "--json").json["checkpoints"][0]["new_bytes"] is None


def test_the_quick_list_sees_a_file_that_was_cut_short(run: Path, command: Command) -> None:
    os.truncate(folder_of(run, 6) / "rank-0.bin", 5)
    assert [r["verified"] for r in command("list", "net", "--json").json["checkpoints"]] == [None, False]
    lines = command("list", "net").out.splitlines()
    assert lines[2].split()[-1] == "DAMAGED"
    assert lines[3].startswith(f"step 6: {folder_of(run, 6)}/rank-0.bin: has 5 bytes, ")  # on one line, however long


def test_a_long_layout_keeps_to_its_column(run: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    original = inspect.read_manifest

    def read(folder: Path) -> index.Manifest:
        import msgspec

        layout = {"strategy": "hybrid-shard", "dp_replicate": 16, "dp_shard": 8, "tp": 8, "sequence_parallel": True}
        layout |= {"pp": 4, "schedule": "interleaved", "cp": 2}
        return msgspec.structs.replace(original(folder), layout=layout, world_size=8192, engine="torchsnapshot")

    monkeypatch.setattr(inspect, "read_manifest", read)
    for columns in (80, 160):
        monkeypatch.setenv("COLUMNS", str(columns))
        lines = command("list", "net").out.splitlines()
        assert max(map(len, lines)) <= columns
        assert "hybrid-shard 16 x 8" in lines[1] and "torchsnapshot" in lines[1] and lines[1].endswith("committed")
    assert len(lines) == 3
    assert "hybrid-shard 16 x 8, tp 8 + sp, cp 2, pp 4 (interleaved)" in lines[1]


def test_a_checkpoint_that_goes_while_it_is_listed_is_left_out(
    run: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = inspect.has_commit_marker

    def gone(folder: Path) -> bool:
        if index.parse_step(folder) == 3:
            shutil.rmtree(folder, ignore_errors=True)
        return original(folder)

    monkeypatch.setattr(inspect, "has_commit_marker", gone)
    assert [r["step"] for r in command("list", "net", "--json").json["checkpoints"]] == [6]


def test_one_of_them_by_step_or_path(run: Path, command: Command) -> None:
    (folder_of(run, 6) / "COMMITTED").unlink()
    for name in ("net@6", folder_of(run, 6)):
        assert [(r["step"], r["committed"]) for r in command("list", name, "--json").json["checkpoints"]] == [
            (6, False)
        ]
        assert command("list", name).out.splitlines()[1].split()[-2:] == ["not", "committed"]
    assert (
        command("list", run / "checkpoints", "--json").json["checkpoints"]
        == command("list", run, "--json").json["checkpoints"]
    )


def test_no_checkpoints_yet(run: Path, command: Command) -> None:
    shutil.rmtree(run / "checkpoints")
    said = command("list", "net")
    assert (said.code, said.out, said.err) == (0, "", f"no checkpoints in {run}/checkpoints\n")
    assert command("list", "net", "--json").json["checkpoints"] == []


# -- verify and digest


def test_one_that_a_roll_back_has_condemned_is_neither_listed_nor_verified(run: Path, command: Command) -> None:
    rollback.record_rollback(
        run / "checkpoints",
        None,
        RollbackTarget(last_step=6, max_step=5, reason="a spike", excluded={}, max_rollbacks=1),
    )
    assert [row["step"] for row in command("list", "net", "--json").json["checkpoints"]] == [3]
    flip(run, 6)
    said = command("verify", "net")
    assert (said.code, said.out) == (0, "step 3: ok\n")


def test_list_without_a_readable_record_of_rollbacks(run: Path, command: Command, tmp_path: Path) -> None:
    """Other commands, like the next attempt, refuse: they cannot know which checkpoints a rollback invalidated."""
    record = run / "checkpoints" / rollback.RECORD_FILE
    record.write_text('[{"last_step": 6, "max')
    said = command("list", "net")
    assert said.code == 0 and [line.split()[0] for line in said.out.splitlines()] == ["step", "3", "6"]
    problem, fix = said.err.splitlines()
    assert f"{record}: cannot be read" in problem and "a rollback invalidated" in problem and fix[:7] == "  fix: "
    document = command("list", "net", "--json").json
    assert [row["step"] for row in document["checkpoints"]] == [3, 6] and str(record) in document["record_error"]
    assert [row["step"] for row in command("list", "net@6", "--json").json["checkpoints"]] == [6]
    refused = ["prune", "net", "--keep", "1"], ["export", "net", "-o", tmp_path / "model"], ["digest", "net"]
    for words in (*refused, ["diff", "net@3", "net@6"]):
        said = command(*words)
        assert said.code == 1 and f"{record}: cannot be read" in said.err and said.out == "", words
    assert folder_of(run, 3).exists() and not (tmp_path / "model").exists()
    assert command("digest", folder_of(run, 3)).code == 0, "a path is not checked against the record"
    record.unlink()
    assert command("list", "net", "--json").json["record_error"] is None


def test_verify_without_a_readable_record_of_rollbacks(run: Path, command: Command) -> None:
    record = run / "checkpoints" / rollback.RECORD_FILE
    record.write_text("{}")
    said = command("verify", "net")
    assert (said.code, said.out) == (1, "step 3: ok\nstep 6: ok\n")
    problem, fix = said.err.splitlines()
    assert f"{record}: cannot be read" in problem and "shown" not in problem
    assert fix.startswith("  fix: ") and "delete it" in fix
    for words in (["net@3"], ["net", "--step", "3"], [folder_of(run, 3)]):
        said = command("verify", *words)
        assert (said.code, said.out) == (1, "step 3: ok\n") and str(record) in said.err, words
    said = command("verify", "net", "--json")
    assert said.code == 1 and [row["verified"] for row in said.json["checkpoints"]] == [True, True]
    assert said.json["record_error"].startswith(f"{record}: ") and said.err.count("\n") == 2
    assert "existing steps: 3, 6" in command("verify", "net@4").err
    record.unlink()
    said = command("verify", "net", "--json")
    assert (said.code, said.json["record_error"], said.err) == (0, None, "")


def test_verify_names_every_damaged_file_and_goes_on(run: Path, command: Command) -> None:
    assert command("verify", "net").out == "step 3: ok\nstep 6: ok\n"
    path = flip(run, 3)
    said = command("verify", "net")
    assert (said.code, said.out) == (1, "step 3: DAMAGED\nstep 6: ok\n")
    assert f"clustertrain: {path}: " in said.err
    said = command("verify", "net", "--json")
    assert said.code == 1
    assert [(r["step"], r["verified"], r["damage"] is None) for r in said.json["checkpoints"]] == [
        (3, False, False),
        (6, True, True),
    ]
    assert str(path) in said.json["checkpoints"][0]["damage"]
    assert command("verify", "net@6").code == command("verify", "net", "--step", "6").code == 0
    assert command("verify", folder_of(run, 3)).code == 1


def test_each_of_several_damaged_files_is_told_once(run: Path) -> None:
    folder = folder_of(run, 3)
    manifest = index.read_manifest(folder)
    tensors = list(manifest.tensors)
    shutil.copy(folder / "rank-0.bin", folder / "rank-1.bin")
    import msgspec

    for i in range(0, len(tensors), 2):  # every other tensor lies in the copy
        shards = [msgspec.structs.replace(s, file="rank-1.bin") for s in tensors[i].shards]
        tensors[i] = msgspec.structs.replace(tensors[i], shards=tuple(shards))
    files = {**manifest.files, "rank-1.bin": manifest.files["rank-0.bin"]}
    index.write_manifest(folder, msgspec.structs.replace(manifest, tensors=tuple(tensors), files=files))
    done: list[int] = []
    assert inspect.find_damage(folder, lambda so_far, _: done.append(so_far)) == []
    assert done[-1] == sum(s.nbytes for t in tensors for s in t.shards) and done == sorted(done)
    for name in ("rank-0.bin", "rank-1.bin"):
        (folder / name).write_bytes(bytes((folder / name).stat().st_size))
    assert sorted(d.split(":")[0] for d in inspect.find_damage(folder)) == [f"{folder}/rank-{r}.bin" for r in (0, 1)]
    (folder / "rank-0.bin").unlink()
    assert "No such file" in next(d for d in inspect.find_damage(folder) if "rank-0.bin" in d)
    flip(folder.parents[1], 3, "manifest.json")
    assert [d.split(":")[0] for d in inspect.find_damage(folder)] == [f"{folder}/manifest.json"]


def test_what_cannot_be_read_is_not_called_damaged(run: Path, command: Command) -> None:
    marker = folder_of(run, 3) / "COMMITTED"
    marker.write_text(json.dumps({**json.loads(marker.read_text()), "format": 99}))
    said = command("verify", "net")
    assert (said.code, said.out) == (1, "step 3: UNREADABLE\nstep 6: ok\n")
    assert "written in format 99" in said.err
    row = command("verify", "net@3", "--json").json["checkpoints"][0]
    assert (row["verified"], row["damage"]) == (None, None) and "format 99" in row["unreadable"]


def test_a_digest_is_of_the_model_the_optimizer_or_both(run: Path, command: Command) -> None:
    values = {kind: command("digest", "net", "--of", kind).out for kind in ("model", "optimizer", "all")}
    assert len(set(values.values())) == 3
    assert command("digest", "net").out == values["all"]
    assert command("digest", "net@3", "--of", "model").out != values["model"]
    assert command("digest", run / "checkpoints" / "step-00000006", "--of", "model", "--json").json == {
        "run": str(run / "checkpoints"),
        "step": 6,
        "contents": "model",
        "digest": values["model"].strip(),
    }


# -- diff


def test_diff_of_equals(run: Path, command: Command) -> None:
    said = command("diff", "net", "net@6")
    assert said.code == 0
    assert said.out.splitlines()[:2] == [f"A  {folder_of(run, 6)}", f"B  {folder_of(run, 6)}"]
    assert said.out.splitlines()[-1].startswith("equal: ")


def test_diff_of_two_that_were_judged_by_another_value(run: Path, command: Command) -> None:
    for step, value in ((3, 2.5), (6, 1.5)):
        folder = index.step_folder(run / "checkpoints", step)
        change_index(folder, metric=CheckpointMetric(name="validation_loss", value=value))
    said = command("diff", "net@3", "net@6", "--all")
    assert said.code == 1 and "Traceback" not in said.err
    (line,) = [line for line in said.out.splitlines() if line.strip().startswith("metric/value")]
    assert line.split() == ["metric/value", "2.5", "1.5"]
    found = command("diff", "net@3", "net@6", "--json").json
    assert {"name": "metric/value", "only": None, "a": 2.5, "b": 1.5} in found["saved"]


def test_diff_of_two_steps(run: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    said = command("diff", "net@3", "net")
    assert said.code == 1
    assert max(len(line) for line in said.out.splitlines()[3:]) <= 80
    shown, every = said.out.splitlines(), command("diff", "net@3", "net", "--all").out.splitlines()
    assert "tensors  48 of 49 differ (model 12, optimizer 36)" in shown
    assert "and 38 more: --all shows them" in shown
    assert "data/position  30  60" in shown and "step           3   6" in shown
    assert sum("optimizer/state/" in line for line in every) == 36
    found = command("diff", "net@3", "net", "--json")
    assert (found.code, found.json["equal"], len(found.json["bytes"])) == (1, False, 48)
    assert found.json["a"] == {"run": "net-abcdef", "step": 3, "path": str(folder_of(run, 3))}
    assert set(found.json) == {
        "a", "b", "equal", "tensors", "only_a", "only_b", "forms", "bytes", "values", "saved", "ranks_compared",
    }  # fmt: skip
    assert set(found.json["bytes"][0]) == {
        "name", "kind", "elements", "differing", "not_finite", "max_abs", "relative",
    }  # fmt: skip
    monkeypatch.setenv("COLUMNS", "160")
    wide = command("diff", "net@3", "net", "--all").out
    assert "optimizer/state/layers.0.attention_norm.weight/exp_avg_sq\n" in wide


def test_diff_of_other_models(run: Path, command: Command, tmp_path: Path) -> None:
    make_run(tmp_path / "home" / "runs" / "other-abcdef", decoder(recipe_of(tie_embeddings=True, kv_heads=4)), (6,))
    said = command("diff", "net", "other")
    assert said.code == 1
    assert "6 with another dtype or shape; " in " ".join(said.out.split())
    assert "only in A" in said.out and "model/head.weight" in said.out and "only in B" in said.out
    assert "float32 [64, 128]" in said.out


# -- prune


def test_prune_tells_what_it_would_delete(run: Path, command: Command) -> None:
    old = str(folder_of(run, 3))
    assert command("prune", "net", "--keep", "1", "--dry-run").out == f"would delete {old}\n"
    assert command("prune", "net", "--keep", "1", "--dry-run", "--json").json == {
        "run": "net-abcdef",
        "deleted": [],
        "would_delete": [old],
    }
    assert Path(old).is_dir()
    assert command("prune", "net", "--keep", "1", "--json").json == {
        "run": "net-abcdef",
        "deleted": [old],
        "would_delete": [],
    }
    assert not Path(old).exists()


# -- what cannot be


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["list", "nope"], 1, "no run 'nope'"),
        (["list", "./nope"], 1, "does not exist"),
        (["verify", "net", "--step", "7"], 1, "no committed checkpoint of step 7; existing steps: 3, 6"),
        (["digest", "net@7"], 1, "no committed checkpoint of step 7"),
        (["digest", "net", "--of", "data"], 2, "'data' is not one of"),
        (["diff", "net"], 2, "Missing argument 'B'"),
        (["diff", "net@7", "net"], 1, "no committed checkpoint of step 7"),
        (["diff", "net@3@6", "net"], 2, "leave out @6"),
        (["export", "net"], 2, "Missing option"),
        (["export", "net@3", "--step", "6", "-o", "x"], 2, "RUN already names the checkpoint of step 3"),
        (["export", "net", "-o", "x", "--dtype", "int9"], 2, "'int9' is not one of"),
        (["export", "net", "-o", "no/x"], 1, "does not exist"),
        (["export", "net", "-o", "spec.toml"], 2, "already exists"),
        (["export", "net", "-o", "checkpoints", "--force"], 2, "not part of an export"),
        (["prune", "net@3", "--keep", "1"], 2, "is one checkpoint"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_is_said_in_a_sentence(
    run: Path, command: Command, monkeypatch: pytest.MonkeyPatch, words: list[str], code: int, text: str
) -> None:
    monkeypatch.chdir(run)
    before = sorted(p.name for p in run.iterdir())
    said = command(*words)
    assert (said.code, said.out) == (code, "")
    assert text in said.err
    assert sorted(p.name for p in run.iterdir()) == before


@pytest.mark.parametrize(
    "words", [["digest", "net"], ["diff", "net@3", "net@6"], ["export", "net", "-o", "out"]], ids=" ".join
)
@pytest.mark.parametrize("as_json", [False, True])
def test_damage_is_told_with_the_files_name(
    run: Path, command: Command, monkeypatch: pytest.MonkeyPatch, words: list[str], as_json: bool
) -> None:
    monkeypatch.chdir(run)
    path = flip(run, 6)
    said = command(*words, *(["--json"] if as_json else []))
    assert (said.code, said.out) == (1, "")
    assert str(path) in said.err
    assert not (run / "out").exists()


def test_a_folder_that_was_never_committed_or_is_set_aside(run: Path, command: Command) -> None:
    folder_of(run, 6).rename(index.damaged_folder(folder_of(run, 6)))
    aside = index.damaged_folder(folder_of(run, 6))
    assert command("verify", aside).out == "step 6: ok\n"  # the one that was named, though there is none of step 6
    (aside / "COMMITTED").unlink()
    said = command("digest", aside)
    assert (said.code, f"{aside} was never committed" in said.err) == (1, True)


# -- progress


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("terminal_there", "seconds", "shown"), [(True, 2.0, True), (True, 0.5, False), (False, 2.0, False)]
)
def test_a_bar_for_what_lasts_where_somebody_looks(
    monkeypatch: pytest.MonkeyPatch, terminal_there: bool, seconds: float, shown: bool
) -> None:
    now = [0.0]
    out = Tty() if terminal_there else io.StringIO()
    monkeypatch.setattr(clock, "monotonic", lambda: now[0])
    monkeypatch.setattr(sys, "stderr", out)
    monkeypatch.setattr(terminal, "make_console", lambda file: Console(file=file, force_terminal=True, width=80))
    with progress.ProgressBar("step 3") as bar:
        bar(0, 100)
        now[0] = seconds
        bar(50, 100)
        bar(100, 100)
    assert ("step 3" in out.getvalue()) is shown
    assert (out.getvalue() != "") is shown
