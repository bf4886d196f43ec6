"""What this machine is, as far as the system tells."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path


def processor() -> str:
    """The processor's name, where the system tells it."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:  # of hundreds of processors; the first is enough
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def physical_cores() -> int:
    """Cores that this process may use, hyper-threads counted once and a container's CPU quota respected.

    Where the system does not tell (only Linux does, in files), 0: ONNX Runtime then counts for itself.
    """
    if not hasattr(os, "sched_getaffinity"):
        return 0
    cores = {_siblings(cpu) for cpu in os.sched_getaffinity(0)}
    return max(1, min(len(cores), _quota()))


def _siblings(cpu: int) -> str:
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text(encoding="ascii")
    except OSError:
        return str(cpu)


def _quota() -> int:
    """CPUs' worth of time that the control group grants, rounded up (kernel documentation: cgroup-v2, ``cpu.max``)."""
    try:
        text = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii")
    except OSError:
        return 1 << 16
    granted = re.fullmatch(r"(\d+) (\d+)\s*", text)
    return -(-int(granted[1]) // int(granted[2])) if granted else 1 << 16
