"""An agent to be packed: reads readings as JSON on standard input, prints what they mean.

It imports a module beside it, which reads a file beside it, and two distributions with native code.
Nothing here knows that it will be in a package.
"""

from __future__ import annotations

import sys

import msgspec
from trend import Trend, read_words


class Readings(msgspec.Struct, forbid_unknown_fields=True):
    """What is asked: temperatures in degrees Celsius, the latest last."""

    place: str
    celsius: list[float]


def main() -> None:
    """Answer one question."""
    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=Readings)
    trend = Trend(asked.celsius)
    text = f"{trend.latest:.0f} °C and {trend.word(read_words())}"
    sys.stdout.write(msgspec.json.encode({"place": asked.place, "text": text}).decode() + "\n")


if __name__ == "__main__":
    main()
