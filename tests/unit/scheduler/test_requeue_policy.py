"""The ending of an attempt, from the evidence, and the decision that follows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from clustertrain.run import endings
from clustertrain.run.attempts import Attempt
from clustertrain.run.results import FailureKind, LastSeen, NodeResult, RankEnding, RankOutcome
from clustertrain.scheduler.backend import JobView
from clustertrain.scheduler.requeue_policy import AttemptOutcome, Evidence, classify, decide

NODES = ("n1", "n2")
RUNNING = JobView("7", "RUNNING")
PREEMPTED = JobView("7", "RUNNING", preempt_time=990.0)


def make_result(ending: RankEnding, kind: FailureKind | None = None, message: str = "it broke") -> NodeResult:
    return NodeResult(ending=ending, kind=kind, message=message, step=10)


def make_evidence(results: dict[str, NodeResult], **changes: Any) -> Evidence:
    base = Evidence(
        nodes=NODES,
        results=results,
        cancelled=False,
        view=RUNNING,
        accounting_state="",
        step_exit_code=0,
        requeue_requested=False,
        end_time=None,
        lead_s=60.0,
        stop_requested_at=None,
        stop_sources=(),
        out_of_time=False,
        now=1000.0,
    )
    return replace(base, **changes)


STOPPED = {n: make_result("stopped") for n in NODES}
COMPLETED = {n: make_result("completed") for n in NODES}


@pytest.mark.parametrize(
    ("evidence", "ending"),
    [
        (make_evidence(COMPLETED), endings.COMPLETED),
        # A run that completes at the moment of its cancellation is complete.
        (make_evidence(COMPLETED, cancelled=True), endings.COMPLETED),
        (make_evidence(STOPPED, cancelled=True), endings.CANCELLED),
        (make_evidence(STOPPED, view=JobView("7", "RUNNING", preempt_time=990.0)), endings.PREEMPTED),
        (make_evidence(STOPPED, requeue_requested=True), endings.PREEMPTED),
        (make_evidence(STOPPED, end_time=1050.0, stop_requested_at=995.0), endings.TIME_LIMIT),
        # A failure while Slurm takes the job down counts as the preemption, whatever it looks like.
        (
            make_evidence({"n1": make_result("failed", "error")}, view=PREEMPTED, stop_requested_at=995.0),
            endings.PREEMPTED,
        ),
        (make_evidence({"n1": make_result("failed", "killed")}, out_of_time=True), endings.TIME_LIMIT),
        (
            make_evidence({"n1": make_result("failed", "storage"), "n2": make_result("failed", "communication")}),
            endings.UNKNOWN,
        ),
        # scancel --signal, or kill: the job continues, and nothing preempts it.
        (
            make_evidence(STOPPED, end_time=5000.0, stop_requested_at=995.0, stop_sources=("signal:SIGTERM",)),
            endings.SIGNAL,
        ),
        (make_evidence(STOPPED, view=None, stop_requested_at=995.0, stop_sources=("signal:SIGTERM",)), endings.UNKNOWN),
        # scontrol requeue, with the output of squeue and sacct of Slurm 22.05.
        (
            make_evidence(STOPPED, view=JobView("7", "COMPLETING", restarts=1), accounting_state="REQUEUED"),
            endings.PREEMPTED,
        ),
        (make_evidence(STOPPED, view=JobView("7", "PENDING", restarts=1), end_time=1005.0), endings.PREEMPTED),
        (
            make_evidence(STOPPED, view=JobView("7", "COMPLETING", restarts=1), restart_count=1, end_time=1005.0),
            "time_limit",
        ),
        (
            make_evidence(STOPPED, view=JobView("7", "PENDING", restarts=1), accounting_state="NODE_FAIL"),
            endings.NODE_FAILURE,
        ),
        # scontrol update TimeLimit: the end that the batch process knew was far away.
        (
            make_evidence(STOPPED, view=JobView("7", "COMPLETING", reason="TimeLimit"), end_time=5000.0),
            endings.TIME_LIMIT,
        ),
        (make_evidence(STOPPED, view=JobView("7", "COMPLETING"), accounting_state="CANCELLED by 0"), endings.CANCELLED),
        (make_evidence(STOPPED, view=JobView("7", "COMPLETING"), end_time=1005.0), endings.TIME_LIMIT),
        (make_evidence({"n1": make_result("failed", "communication")}), endings.NODE_FAILURE),
        # srun returns 0 after a node failure: a missing result is never a success.
        (make_evidence({"n1": make_result("completed")}, step_exit_code=0), endings.NODE_FAILURE),
        (make_evidence({}, step_exit_code=0), endings.UNKNOWN),
        (make_evidence({n: make_result("failed", "communication") for n in NODES}), endings.COMMUNICATION),
        # The rank that hung is killed after its peers time out. Only the peers know of the hang.
        (make_evidence({"n1": make_result("failed", "killed"), "n2": make_result("failed", "hang")}), endings.HANG),
        (
            make_evidence({"n1": make_result("failed", "error"), "n2": make_result("failed", "hang")}),
            endings.FAILED,
        ),
        # A rank that raised explains its peers' broken collectives.
        (
            make_evidence({"n1": make_result("failed", "error"), "n2": make_result("failed", "communication")}),
            endings.FAILED,
        ),
        (
            make_evidence({"n1": make_result("failed", "out_of_memory"), "n2": make_result("failed", "error")}),
            "out_of_memory",
        ),
        (
            make_evidence({"n1": make_result("failed", "communication"), "n2": make_result("failed", "device")}),
            endings.UNKNOWN,
        ),
        (
            make_evidence({"n1": make_result("failed", "killed"), "n2": make_result("failed", "communication")}),
            endings.UNKNOWN,
        ),
    ],
)
def test_ending_follows_from_the_evidence(evidence: Evidence, ending: str) -> None:
    outcome = classify(evidence)
    assert outcome is not None
    assert outcome.ending == ending


def test_no_outcome_while_slurm_ends_a_job_without_a_reason() -> None:
    assert (
        classify(make_evidence({"n1": make_result("failed", "communication")}, view=JobView("7", "COMPLETING"))) is None
    )


def test_scontrol_requeue_is_named_in_the_reason() -> None:
    outcome = classify(make_evidence(STOPPED, view=JobView("7", "COMPLETING", restarts=1), accounting_state="REQUEUED"))
    assert outcome is not None and "scontrol requeue" in outcome.reason


def test_node_whose_agent_ended_without_a_result_is_not_blamed() -> None:
    ended = make_evidence(
        {"n1": make_result("failed", kind="communication")}, step_exit_code=1, nodes_without_agent=frozenset({"n2"})
    )
    outcome = classify(ended)
    assert outcome is not None
    assert (outcome.ending, outcome.blamed_nodes) == (endings.UNKNOWN, ())
    assert outcome.reason == "the agent on n2 ended without a result: see job.log"


def test_lost_node_is_blamed_and_excluded() -> None:
    outcome = classify(make_evidence({"n1": make_result("failed", "communication")}))
    assert outcome is not None
    decision = decide(outcome, [attempt(1, endings.NODE_FAILURE)], 50)
    assert (decision.action, decision.exclude) == ("resubmit", ("n2",))


def test_killed_agent_does_not_blame_its_node() -> None:
    outcome = classify(make_evidence({"n1": make_result("failed", "communication")}, step_exit_code=137))
    assert outcome is not None
    assert (outcome.ending, outcome.blamed_nodes) == (endings.UNKNOWN, ())
    assert outcome.reason == "the agent on n2 was killed by SIGKILL, and its ranks with it"


@pytest.mark.parametrize(("view", "ending"), [(RUNNING, endings.SIGNAL), (PREEMPTED, endings.PREEMPTED)])
def test_agent_that_gets_a_signal_while_starting(view: JobView, ending: str) -> None:
    # scancel -s TERM, or the warning of a preemption, before Python has installed the handlers.
    outcome = classify(make_evidence({}, view=view, step_exit_code=143, nodes_without_agent=frozenset(NODES)))
    assert outcome is not None and outcome.ending == ending and "SIGTERM" in outcome.reason


def test_agents_that_are_ended_after_their_ranks() -> None:
    outcome = classify(make_evidence(STOPPED, view=None, stop_requested_at=985.0, end_time=1010.0, out_of_time=True))
    assert outcome is not None and outcome.ending == endings.TIME_LIMIT
    assert outcome.reason.startswith("the agents were still writing")
    unknown_to_slurm = classify(
        make_evidence({"n1": make_result("failed", "communication")}, step_exit_code=137, view=None)
    )
    assert unknown_to_slurm is not None and unknown_to_slurm.blamed_nodes == ("n2",)


def test_reason_of_a_hang_combines_all_nodes() -> None:
    waited = RankOutcome(rank=0, ending="failed", kind="hang", last_seen=LastSeen(step=16, phase="train"))
    silent = RankOutcome(rank=1, ending="failed", kind="killed", last_seen=LastSeen(step=15, phase="train"))
    results = {
        "n1": structs.replace(make_result("failed", "hang", "rank 0 on n1: timed out"), ranks=(waited,)),
        "n2": structs.replace(make_result("failed", "killed"), ranks=(silent,)),
    }
    outcome = classify(make_evidence(results))
    assert outcome is not None and outcome.ending == endings.HANG
    assert outcome.reason == (
        "rank 0 waited in a collective until it timed out, at step 17; rank 1 did not reach it: "
        "last seen on n2, in step 16, phase train, see logs/rank-1.log"
    )


def test_script_that_exits_with_75_is_requeued() -> None:
    why = "the script ended with exit code 75, which requests another attempt"
    outcome = classify(make_evidence({n: structs.replace(make_result("stopped"), reason=why) for n in NODES}))
    assert outcome == AttemptOutcome(endings.UNKNOWN, why)
    assert action(outcome.ending, [attempt(1, outcome.ending)]) == "requeue"


def test_script_that_heeds_the_early_warning_ends_by_time_limit() -> None:
    outcome = classify(make_evidence(STOPPED, end_time=1300.0, stop_requested_at=1000.0, stop_sources=("deadline",)))
    assert outcome is not None and outcome.ending == endings.TIME_LIMIT


def test_bad_environment_is_not_requeued_and_exits_with_78() -> None:
    outcome = classify(make_evidence({n: make_result("failed", "environment") for n in NODES}))
    assert outcome is not None
    decision = decide(outcome, [attempt(1, outcome.ending)], 50)
    assert (decision.action, decision.exit_code) == ("stop", 78)


def test_run_folder_invisible_to_all_agents_exits_with_78() -> None:
    outcome = classify(make_evidence({}, step_exit_code=78))
    assert outcome is not None
    assert decide(outcome, [attempt(1, outcome.ending)], 50).exit_code == 78


def test_run_folder_invisible_to_one_agent_exits_with_78() -> None:
    outcome = classify(make_evidence({"n1": make_result("failed", "communication")}, step_exit_code=78))
    assert outcome is not None
    decision = decide(outcome, [attempt(1, outcome.ending)], 50)
    assert (decision.action, decision.exit_code) == ("stop", 78)
    assert "n2" in decision.reason


def attempt(n: int, ending: str | None, **changes: Any) -> Attempt:
    base = Attempt(
        n=n,
        job_id="7",
        restart=n - 1,
        nodes=NODES,
        host="n1",
        start=float(n),
        end=float(n) + 0.5,
        ending=ending,
        reason=None,
        first_step=0,
        last_step=5,
        restored_step=None,
        committed_step=None,
        requeued=None,
        stopped=None,
    )
    values = {f: getattr(base, f) for f in base.__struct_fields__}
    return Attempt(**{**values, **changes})


def action(ending: endings.Ending, history: list[Attempt], max_requeues: int = 50) -> str:
    return decide(AttemptOutcome(ending, "…"), history, max_requeues).action


def test_failed_attempt_is_never_requeued() -> None:
    assert action(endings.FAILED, [attempt(1, endings.FAILED)]) == "stop"


@pytest.mark.parametrize("ending", [endings.UNKNOWN, endings.COMMUNICATION, endings.HANG, endings.OUT_OF_MEMORY])
def test_each_ending_has_its_own_retry_budget(ending: endings.Ending) -> None:
    allowed = endings.RETRY_BUDGET[ending]
    within = [attempt(n, ending) for n in range(1, allowed + 1)]
    assert action(ending, within) == "requeue"
    assert action(ending, [*within, attempt(allowed + 1, ending)]) == "stop"


def test_progress_refills_the_budgets() -> None:
    spent = [attempt(n, endings.COMMUNICATION) for n in range(1, 4)]
    progressed = attempt(4, endings.COMMUNICATION, restored_step=10, committed_step=20)
    assert action(endings.COMMUNICATION, [*spent, progressed]) == "requeue"
    assert action(endings.COMMUNICATION, [*spent, progressed, attempt(5, endings.COMMUNICATION)]) == "requeue"


def test_committing_the_same_step_again_is_not_progress() -> None:
    history = [attempt(n, endings.UNKNOWN, restored_step=20, committed_step=20) for n in range(1, 4)]
    assert action(endings.UNKNOWN, history) == "stop"


def test_preemption_before_the_first_step_uses_no_budget() -> None:
    history = [attempt(n, endings.PREEMPTED, first_step=None, last_step=None) for n in range(1, 40)]
    assert action(endings.PREEMPTED, history) == "requeue"


def test_time_limits_of_a_script_that_ends_itself_use_no_budget() -> None:
    history = [
        attempt(n, endings.TIME_LIMIT, first_step=None, last_step=None, ended_by_script=True) for n in range(1, 9)
    ]
    assert action(endings.TIME_LIMIT, history) == "requeue"
    unknown = [attempt(n, endings.UNKNOWN, ended_by_script=True) for n in range(1, 4)]
    assert action(endings.UNKNOWN, unknown) == "stop"


def watched(n: int, ending: str, *, saved: bool = False, **changes: Any) -> Attempt:
    """An attempt of a command whose checkpoints are named, and that ends itself at a stop."""
    changes = {"first_step": None, "ended_by_script": True, **changes}
    return attempt(n, ending, checkpoint_times=(1.0, 1.0), saved_checkpoint=saved, **changes)


def test_command_is_chained_over_time_limits_while_it_saves() -> None:
    saving = [watched(n, endings.TIME_LIMIT, saved=True) for n in range(1, 30)]
    assert action(endings.TIME_LIMIT, saving) == "requeue"
    idle = [watched(n, endings.TIME_LIMIT) for n in range(30, 33)]
    assert action(endings.TIME_LIMIT, [*saving, *idle[:2]]) == "requeue"
    decision = decide(AttemptOutcome(endings.TIME_LIMIT, "…"), [*saving, *idle], 50)
    assert (decision.action, "no progress: 3 attempts in a row" in decision.reason) == ("stop", True)
    with_steps = [watched(n, endings.PREEMPTED, first_step=1) for n in range(1, 7)]
    decision = decide(AttemptOutcome(endings.PREEMPTED, "…"), with_steps, 50)
    assert decision.reason == "no progress: 6 attempts in a row saved no newer checkpoint"


@pytest.mark.parametrize("is_watched", [True, False])
def test_stops_that_save_nothing_end_the_run_in_the_end(is_watched: bool) -> None:
    def stopped(n: int, **changes: Any) -> Attempt:
        if is_watched:
            return watched(n, endings.PREEMPTED, **changes)
        options = {"first_step": None, "ended_by_script": True, "ended_by_signal": True, **changes}
        return attempt(n, endings.TIME_LIMIT if n % 2 else endings.PREEMPTED, **options)

    history = [stopped(n) for n in range(1, 22)]
    assert action(endings.PREEMPTED, history[:20]) == "requeue"
    decision = decide(AttemptOutcome(endings.PREEMPTED, "…"), history, 50)
    assert decision.action == "stop" and "no progress: 21 stops" in decision.reason
    assert ("--checkpoints" in decision.reason) != is_watched
    # The next attempt of a program with torch.optim shows that the one before had saved.
    saved = [*history[:10], stopped(11, first_step=20, committed_step=25, restored_step=19), *history[11:]]
    assert action(endings.PREEMPTED, saved) == "requeue"


def test_steps_of_a_program_that_begins_again_count_once() -> None:
    first = attempt(1, endings.TIME_LIMIT, committed_step=50)
    again = [attempt(n, endings.TIME_LIMIT, committed_step=40 + n, earlier_step=50) for n in range(2, 5)]
    assert action(endings.TIME_LIMIT, [first, *again]) == "stop"
    further = attempt(5, endings.TIME_LIMIT, committed_step=60, earlier_step=50)
    assert action(endings.TIME_LIMIT, [first, *again, further]) == "requeue"


def test_attempts_without_progress_stop_the_run() -> None:
    names = [endings.UNKNOWN, endings.COMMUNICATION, endings.HANG] * 2
    decision = decide(AttemptOutcome(names[-1], "…"), [attempt(n + 1, e) for n, e in enumerate(names)], 50)
    assert decision.action == "stop"
    assert decision.exit_code == 93
    assert "no progress" in decision.reason


def test_max_requeues_counts_starts_after_the_first() -> None:
    def preempted(n: int) -> Attempt:
        return attempt(n, endings.PREEMPTED, committed_step=10 * n, restored_step=10 * n - 10)

    assert action(endings.PREEMPTED, [preempted(1)], max_requeues=1) == "requeue"
    assert action(endings.PREEMPTED, [preempted(1), preempted(2)], max_requeues=1) == "stop"
    assert action(endings.PREEMPTED, [preempted(1)], max_requeues=0) == "stop"


SPENT = {
    n: structs.replace(make_result("stopped"), budget_spent=True, reason="the budget is spent: 10 of gpu_hours = 10")
    for n in NODES
}


def test_spent_gpu_budget_is_not_requeued() -> None:
    outcome = classify(make_evidence(SPENT))
    assert outcome == AttemptOutcome(endings.BUDGET_SPENT, "the budget is spent: 10 of gpu_hours = 10")
    decision = decide(outcome, [], 50)
    assert (decision.action, decision.exit_code, decision.reason) == ("stop", 93, outcome.reason)


def test_early_stop_keeps_its_reason() -> None:
    early = {n: structs.replace(make_result("completed"), reason="early stop: no better") for n in NODES}
    assert classify(make_evidence(early)) == AttemptOutcome(endings.COMPLETED, "early stop: no better")
