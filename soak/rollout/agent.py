"""The agent in each sandbox: it steps, applies each answer to a file, and dies now and then.

It remembers nothing but that file: started again, it reports the step after the last line.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time

from dsec.agent_channel import AgentChannel
from soak.rollout.effects import NOTHING, append, chained, line_of, read_lines

APPLIED = "/var/tmp/applied"  # noqa: S108  in a sandbox
STARTS = "/var/tmp/starts"  # noqa: S108  in a sandbox
STAGE = "step"
#: One in so many steps is one during which it dies, with SIGKILL.
_DIES_ONE_IN = 200
#: What its work between two steps takes at most, in seconds.
_WORK_S = 0.05
#: Longer than any part of the platform is away.
_PATIENCE_S = 600.0


def main(seed: str) -> None:
    """Step until an answer says that it is done."""
    append(STARTS, "started")
    chance = random.Random(f"{seed} {len(read_lines(STARTS))}")  # noqa: S311  to be repeated
    lines = read_lines(APPLIED)
    digest = NOTHING
    for line in lines:
        digest = chained(digest, line)
    seq = len(lines)
    done = bool(lines) and '"done": true' in lines[-1]
    with AgentChannel(patience_s=_PATIENCE_S) as channel:
        while not done:
            seq += 1
            dies_at = chance.randrange(3 * _DIES_ONE_IN)
            time.sleep(chance.uniform(0, _WORK_S))
            _die_if(dies_at == 0)
            answer = channel.step(STAGE, {"digest": digest}, seq=seq)
            _die_if(dies_at == 1)
            line = line_of(answer)
            append(APPLIED, line)
            _die_if(dies_at == 2)  # noqa: PLR2004  after its effect
            digest = chained(digest, line)
            done = answer["done"]


def _die_if(it_does: bool) -> None:
    if it_does:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1])
