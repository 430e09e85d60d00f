"""The page of the node says of each state what the code's table says."""

from __future__ import annotations

from documents import page
from dsec_common.wire.sandbox import EndCause, SandboxState
from dsec_sandboxd.states import AWAKE_OR_ASLEEP, STATES, StateFacts

COLUMNS = (
    "state",
    "meaning",
    "requests go in",
    "may be paused",
    "holds room",
    "time to live runs",
    "idle time runs",
    "next",
)


def row(state: SandboxState, facts: StateFacts) -> tuple[str, ...]:
    goes_in = "at once" if facts.can_exec else "once it runs" if facts.can_wake else ""
    marks = (facts.can_pause, facts.counts_against_node, facts.deadline_runs, facts.idle_runs)
    return (
        f"`{state}`",
        facts.meaning,
        goes_in,
        *("yes" if mark else "" for mark in marks),
        ", ".join(f"`{following}`" for following in facts.following),
    )


def test_the_table_of_states_is_the_codes() -> None:
    shown = [tuple(cells) for cells in page("docs/services/sandboxd.md").table(*COLUMNS)]
    assert shown == [row(state, facts) for state, facts in STATES.items()]


def test_every_state_has_its_line_and_only_the_last_leads_nowhere() -> None:
    assert set(STATES) == set(SandboxState)
    assert [state for state, facts in STATES.items() if not facts.following] == [SandboxState.ENDED]
    assert all(
        SandboxState.ENDED in facts.following
        for facts in STATES.values()
        if facts.counts_against_node
    )


def test_what_is_in_the_kernel_and_not_ending_can_be_paused_woken_and_timed() -> None:
    for state, facts in STATES.items():
        alive = state in AWAKE_OR_ASLEEP
        assert facts.can_pause is alive
        assert facts.deadline_runs is alive
        assert facts.can_delete
        assert (facts.can_exec or facts.can_wake) is alive


def test_every_cause_of_an_end_is_named() -> None:
    text = page("docs/services/sandboxd.md").text
    causes = text[text.index("Causes of an end:") :].partition("\n\n")[0]
    assert [cause for cause in EndCause if f"`{cause}`" not in causes] == []
