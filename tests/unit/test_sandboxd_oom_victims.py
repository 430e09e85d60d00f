"""What a sandbox's log of the processes that ended for want of memory says of its own end."""

from __future__ import annotations

from dsec_sandboxd.kernel.oom_victims import MarkedVictim, VictimLog


def log_of(*victims: tuple[str, int]) -> VictimLog:
    log = VictimLog()
    for name, pid in victims:
        log.note(MarkedVictim(name, host_pid=1000 + pid, host_uid=100_000, pid=pid))
    return log


def test_where_all_end_together_the_first_was_chosen_and_not_those_that_went_with_it() -> None:
    many = [(f"worker{pid}", pid) for pid in range(10, 60)]
    said = log_of(("tail", 7), ("init", 1), *many).say(end_all=True)
    assert "chose 'tail' (process 7)" in said


def test_where_commands_end_alone_the_sandbox_ends_by_its_init() -> None:
    said = log_of(("tail", 7), ("init", 1), ("sh", 6)).say(end_all=False)
    assert "chose 'init' (process 1)" in said
    assert "chose 'sh'" in log_of(("tail", 7), ("sh", 0)).say(end_all=False)


def test_without_a_name_the_limit_is_named() -> None:
    for end_all in (True, False):
        assert "limit was reached" in VictimLog().say(end_all=end_all)
