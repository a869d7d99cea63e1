"""The machine a number was measured on."""

import datetime
import importlib.metadata
import os
import platform
import time
from pathlib import Path
from typing import Any

import psutil

PACKAGES = ("shmcollect", "torch", "numpy", "gymnasium")


def usable_cores() -> int:
    """Cores this process may use: by affinity, and no more than a cgroup's quota pays for."""
    cores = len(os.sched_getaffinity(0))
    quota = cgroup_quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def cgroup_quota() -> float | None:
    """The smallest CPU quota in cores of this process's cgroup and those above it, None if there is none."""
    quotas = [
        quota
        for line in Path("/proc/self/cgroup").read_text().splitlines()
        for quota in _quotas(*line.split(":", 2)[1:])
    ]
    return min(quotas, default=None)


def _quotas(controllers: str, group: str) -> list[float]:
    """Quotas from `group` up to the root of its hierarchy; version 2 has no controllers in its name."""
    if controllers == "":
        root, files = Path("/sys/fs/cgroup"), ["cpu.max"]
    elif "cpu" in controllers.split(","):
        root, files = Path("/sys/fs/cgroup/cpu"), ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
    else:
        return []
    own = root / group.lstrip("/")
    found = []
    for folder in (own, *own.parents):
        if folder.is_relative_to(root) and all((folder / file).exists() for file in files):
            words = " ".join((folder / file).read_text() for file in files).split()
            if words[0] not in ("max", "-1"):
                found.append(float(words[0]) / float(words[1]))
    return found


def describe() -> dict[str, Any]:
    """What to record beside a number, as it is now."""
    cpu_info = Path("/proc/cpuinfo").read_text()
    governor = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu_model": _cpu_model(cpu_info),
        "architecture": platform.machine(),
        "virtual_machine": " hypervisor" in cpu_info,
        "governor": governor.read_text().strip() if governor.exists() else None,
        "cores": os.cpu_count(),
        "affinity": sorted(os.sched_getaffinity(0)),
        "cgroup_quota": cgroup_quota(),
        "usable_cores": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "load_average": os.getloadavg(),
        "kernel": platform.release(),
        "clock": time.get_clock_info("monotonic").implementation,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def _cpu_model(cpu_info: str) -> str:
    for line in cpu_info.splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def summary(machine: dict[str, Any]) -> str:
    """One line, the same for all runs on one machine."""
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items() if version)
    virtual = " (virtual machine)" if machine["virtual_machine"] else ""
    return (
        f"{machine['cpu_model']}{virtual}, {machine['usable_cores']} usable of {machine['cores']} cores,"
        f" Linux {machine['kernel']}, Python {machine['python']}, {packages}"
    )
