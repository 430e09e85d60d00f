"""The task: count the distinct lines of a log in an archive, and write the number to a file.

Each group of episodes gets another log, so a number that was right once is no use later. The right
number never is in a sandbox: the trainer keeps it, and compares.
"""

from __future__ import annotations

import io
import random
import tarfile
from dataclasses import dataclass
from typing import Final

WORK: Final = "/work"
ARCHIVE: Final = "logs.tgz"
REPORT: Final = "report"

#: What the policy chooses from. Three of them, in one order, solve the task; one overwrites what
#: it needs with what looks the same from outside.
COMMANDS: Final = (
    "tar -xzf logs.tgz",
    "sort -u app.log > distinct.log",
    "sort app.log > distinct.log",
    "wc -l < distinct.log > report",
    "wc -l < app.log > report",
    "rm -f *.log",
    "tail -n 3 app.log",
)
#: An episode that has not reported after so many commands has failed.
STEPS_MAX: Final = 6


@dataclass(frozen=True)
class Task:
    """One log.

    Attributes:
        archive: what is put into the sandbox.
        answer: what its report has to say; it stays outside.
    """

    archive: bytes
    answer: int

    def is_solved_by(self, report: bytes) -> bool:
        """Return whether a report, whatever an agent wrote into it, is the right one."""
        return report.strip() == str(self.answer).encode()


def make_task(seed: str) -> Task:
    """Return the task of a seed: some lines, some of them more than once, in any order."""
    chance = random.Random(seed)  # noqa: S311  a seeded draw, not a secret
    distinct = chance.randint(5, 40)
    lines = [f"request {number} failed\n" for number in range(distinct)]
    lines += chance.choices(lines, k=chance.randint(5, 40))
    chance.shuffle(lines)
    content = "".join(lines).encode()
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        member = tarfile.TarInfo("app.log")
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    return Task(packed.getvalue(), distinct)
