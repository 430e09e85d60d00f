"""GPUs that are not there: a stand-in for the driver's library, behind the real binding."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Final

GIB: Final = 1 << 30
SWITCH: Final = "switch"
_SOURCE: Final = Path(__file__).parent / "native" / "nvml_stand_in.c"
_VARIABLE: Final = "NVML_STAND_IN"
_NAME: Final = "libnvidia-ml.so.1"


@cache
def library_directory() -> Path:
    """Build the library and return where it is, for ``LD_LIBRARY_PATH``."""
    directory = Path(tempfile.gettempdir()) / f"dsec-nvml-{os.getuid()}"
    directory.mkdir(exist_ok=True)
    if not _is_newer(directory / _NAME):
        part = directory / f"{_NAME}.{os.getpid()}"
        subprocess.run(
            [
                *("cc", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-O1"),
                *(f"-Wl,-soname,{_NAME}", "-o", str(part), str(_SOURCE)),
            ],
            check=True,
        )
        part.rename(directory / _NAME)
    return directory


def _is_newer(built: Path) -> bool:
    return built.exists() and built.stat().st_mtime > _SOURCE.stat().st_mtime


def load_library() -> None:
    """Have this process's ``pynvml`` find the stand-in when it asks for the driver's library."""
    ctypes.CDLL(str(library_directory() / _NAME))


def environment(inventory: Path) -> dict[str, str]:
    """Return what a process needs in its environment to see the GPUs of an inventory."""
    return {"LD_LIBRARY_PATH": str(library_directory()), _VARIABLE: str(inventory)}


class Card(dict[str, str]):
    """One GPU's fields; see ``native/nvml_stand_in.c``."""

    def __init__(self, index: int, name: str, memory_bytes: int, **fields: object) -> None:
        """Take what differs from a card of PCI Express generation 4 with 16 lanes."""
        super().__init__(
            uuid=f"GPU-{index:08x}",
            name=name,
            memory=str(memory_bytes),
            bus=f"00000000:{index + 1:02X}:00.0",
            generation="4",
            width="16",
            generation_now="1",
            width_now="16",
            compute_mode="0",
            busy="0",
        )
        self.update({field: str(value) for field, value in fields.items()})
        self.instances: list[dict[str, str]] = []

    def instance(
        self, uuid: str, profile: str, memory_bytes: int, slices: int, **fields: object
    ) -> None:
        """Cut an instance off it."""
        name = f"{self['name']} MIG {profile}"
        self.instances.append(
            {
                "uuid": uuid,
                "name": name,
                "memory": str(memory_bytes),
                "slices": str(slices),
                **{field: str(value) for field, value in fields.items()},
            }
        )


def a100(index: int, **fields: object) -> Card:
    """Return an A100 with 40 GiB."""
    fields = {"mig": 0, "remapping_failed": 0, **fields}
    return Card(index, "NVIDIA A100-SXM4-40GB", 40 * GIB, **fields)


def l40(index: int, **fields: object) -> Card:
    """Return an L40 with 48 GiB."""
    return Card(index, "NVIDIA L40", 48 * GIB, **fields)


def v100(index: int, **fields: object) -> Card:
    """Return a V100 with 16 GiB, of PCI Express generation 3."""
    return Card(index, "Tesla V100-SXM2-16GB", 16 * GIB, **{"generation": 3, **fields})


class Inventory:
    """The file that the stand-in answers from; it may change while somebody looks."""

    def __init__(self, path: Path) -> None:
        """Take where the file is, or will be."""
        self.path = path

    def write(
        self,
        cards: Iterable[Card],
        *,
        driver: str = "550.54.15",
        fail: str = "",
        hang: str = "",
    ) -> None:
        """Have these cards, at once; calls that hang go on when a later file lets them."""
        lines = [_line("driver", {"version": driver, "fail": fail, "hang": hang})]
        for card in cards:
            lines.append(_line("gpu", card))
            lines += [_line("mig", instance) for instance in card.instances]
        new = self.path.with_suffix(".new")
        new.write_text("".join(lines), encoding="ascii")
        new.rename(self.path)


def _line(kind: str, fields: dict[str, str]) -> str:
    return "\t".join([kind, *(f"{name}={value}" for name, value in fields.items())]) + "\n"
