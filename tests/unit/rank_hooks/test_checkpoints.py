"""Which checkpoints of other frameworks a run has saved, and which one all ranks continue from."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from clustertrain.rank_hooks.clustertrain_hooks import checkpoints, transformers_trainer
from clustertrain.rank_hooks.clustertrain_hooks.guard import guarded
from clustertrain.rank_hooks.clustertrain_hooks.rank import Rank
from tests.unit.rank_hooks.checkpoint_files import cut, write_safetensors, write_trainer_checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_trainer_checkpoint(tmp_path / "checkpoint-7")


def test_newest_whole_one_is_chosen_for_all_ranks(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newer = tmp_path / "checkpoint-12"
    newer.mkdir()
    write_safetensors(newer / "model.safetensors")
    cut(newer / "model.safetensors", 1)
    attempt = tmp_path / "run" / "attempts" / "2"
    attempt.mkdir(parents=True)
    ranks = [
        Rank(rank=r, world_size=2, attempt=2, run_dir=str(tmp_path / "run"), rank_dir=str(tmp_path)) for r in (0, 1)
    ]
    chosen: dict[int, str | None] = {}

    def choose(rank: Rank) -> None:
        def list_candidates() -> list[str]:
            assert rank.rank == 0, "only rank 0 looks"
            return checkpoints.list_numbered(str(tmp_path), r"checkpoint-(\d+)")

        chosen[rank.rank] = checkpoints.choose(rank, "training", list_candidates)

    follower = threading.Thread(target=choose, args=(ranks[1],))
    follower.start()
    choose(ranks[0])
    follower.join(30)
    assert chosen == {0: str(folder), 1: str(folder)}
    assert f"skipping checkpoint {newer}: it has neither trainer_state.json nor" in capsys.readouterr().out


def test_error_of_rank_0_does_not_leave_the_others_waiting(tmp_path: Path) -> None:
    (tmp_path / "attempts" / "2").mkdir(parents=True)
    ranks = [Rank(rank=r, world_size=2, attempt=2, run_dir=str(tmp_path), rank_dir=str(tmp_path)) for r in (0, 1)]
    with pytest.raises(KeyError):
        checkpoints.choose(ranks[0], "training", lambda: {}["folder"])
    assert checkpoints.choose(ranks[1], "training", list) is None


def test_rank_0_that_chooses_nothing_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error would turn the hook off, and this rank would start at another step than rank 0."""
    monkeypatch.setattr(checkpoints, "_CHOICE_PATIENCE_S", 0.2)
    (tmp_path / "attempts" / "2").mkdir(parents=True)
    rank = Rank(rank=1, world_size=2, attempt=2, run_dir=str(tmp_path), rank_dir=str(tmp_path))
    with pytest.raises(SystemExit, match="rank 0 has chosen no checkpoint"):
        guarded(checkpoints.choose)(rank, "training", list)


def test_trainer_resumes_only_from_what_it_can_continue(folder: Path) -> None:
    assert transformers_trainer._find_resume_problem(str(folder), 1) == ""
    (folder / "optimizer.pt").unlink()
    assert "no state of the optimizer (save_only_model)" in transformers_trainer._find_resume_problem(str(folder), 1)
    assert (
        transformers_trainer._find_problem(str(folder), 1) == ""
    )  # with resume_from_checkpoint=True the user asks for it
    (folder / "global_step7").mkdir()  # of deepspeed
    (folder / "global_step7" / "mp_rank_00_model_states.pt").write_bytes(b"\x80\x02.")
    assert transformers_trainer._find_resume_problem(str(folder), 1) == ""
    (folder / "trainer_state.json").unlink()
    assert "no trainer_state.json" in transformers_trainer._find_resume_problem(str(folder), 1)


def test_only_what_this_training_saved_is_listed(tmp_path: Path) -> None:
    def write(attempt: int, *events: dict[str, object]) -> None:
        path = tmp_path / "attempts" / str(attempt) / "events" / "hooks-rank-0.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text("".join(json.dumps(event) + "\n" for event in events) + '{"torn')

    first, second = checkpoints.begin_training("test"), checkpoints.begin_training("test")
    assert first != second
    save = {"event": "checkpoint", "source": first}
    write(1, {**save, "path": "/a/1"}, {**save, "path": "/a/2"}, {**save, "path": "/b", "source": second})
    write(2, {**save, "path": "/a/2"}, {"event": "first_step", "source": first}, {**save, "path": "/a/3"})
    write(3, {**save, "path": "/a/4"})
    rank = Rank(rank=0, world_size=1, attempt=3, run_dir=str(tmp_path), rank_dir=str(tmp_path))
    assert checkpoints.list_saved(rank, first) == ["/a/3", "/a/2", "/a/1"]
    assert checkpoints.list_saved(rank, "other") == []


def test_training_has_one_name_on_all_ranks_and_in_all_attempts() -> None:
    def restore(*argv: str, **environ: str) -> list[str]:
        return checkpoints.restore_arguments(list(argv), environ)

    typed = ["/shared/env/bin/trl", "sft", "--lr", "1"]
    assert restore(*typed) == typed
    added = json.dumps(["--from", "/c/step-7", "--local_rank=3"])
    changed = ("--local_rank=3", *typed[1:], "--from", "/c/step-7")
    assert restore(typed[0], *changed, CLUSTERTRAIN_ADDED_ARGS=added) == typed
    on_node = {"CLUSTERTRAIN_ENVIRONMENT_FOLDERS": '["/tmp/copy/environment", "/link/env", "/shared/env"]'}
    for folder in ("/tmp/copy/environment", "/link/env", "/shared/env"):
        assert restore(f"{folder}/bin/trl", *typed[1:], **on_node) == typed
    assert restore("/shared/env2/bin/trl", **on_node) == ["/shared/env2/bin/trl"]
