"""What this machine offers, found out without importing torch."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

_VERSIONED = ("torch", "triton", "diffusers", "timm", "numpy", "blr-lab")
_DEVICE = re.compile(r"cpu|cuda:\d+")

MIN_TRITON_CAPABILITY = (8, 0)

QUIET_THREADS = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}
"""Environment in which OpenMP's threads sleep while they wait.

Threads that spin take the time of the other processes of a small machine, and turn small calls
into steps of milliseconds.
"""


def normal_device(device: str) -> str:
    """`device` as "cpu" or "cuda:N"; "cuda" is "cuda:0".

    Raises:
        ValueError: for anything else.
    """
    name = "cuda:0" if device == "cuda" else device
    if not isinstance(name, str) or not _DEVICE.fullmatch(name):
        raise ValueError(f"device must be cpu or cuda:N, got {device!r}")
    return name


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on, for those that are installed."""
    found = {"python": platform.python_version()}
    for name in _VERSIONED:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@functools.cache
def cpu_name() -> str:
    """Model name and number of usable cores."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        match = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
        name = match.group(1) if match else name
    cores = usable_cores()
    return f"{name}, {cores} core{'s' if cores != 1 else ''}"


@functools.cache
def usable_cores() -> int:
    """Physical cores that this process may use, at least 1.

    Two threads of one core share its arithmetic units, so more threads than cores only make
    matrix products wait for each other.
    """
    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = min(cores, len(os.sched_getaffinity(0)))
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.exists():
        limit, _, period = quota.read_text().partition(" ")
        if limit.isdigit() and period.strip().isdigit():
            cores = min(cores, round(int(limit) / int(period)))
    return max(1, cores)


def cpu_info() -> dict[str, Any]:
    """The CPU as a device, in the form of `Engine.device_info`."""
    memory = psutil.virtual_memory()
    return {
        "device": "cpu",
        "kind": "cpu",
        "name": cpu_name(),
        "ready": True,
        "memory_total_mib": memory.total / 2**20,
        "memory_free_mib": memory.available / 2**20,
        "versions": versions(),
        "error": "",
    }


def find_cxx() -> str | None:
    """The C++ compiler that `torch.compile` can use on a CPU, or `None`.

    Inductor tries $CXX, or g++ (clang++ on a Mac, cl on Windows), by asking for its version;
    we also take clang++ where g++ is missing and hand it over in $CXX.
    """
    return _find_cxx(os.environ.get("CXX"), os.environ.get("PATH", ""))


@functools.cache
def _find_cxx(chosen: str | None, path: str) -> str | None:
    if chosen:
        candidates: tuple[str, ...] = (chosen,)
    elif sys.platform == "win32":
        return "cl" if shutil.which("cl", path=path) else None
    elif sys.platform == "darwin":
        candidates = ("clang++", "g++")
    else:
        candidates = ("g++", "clang++")
    for candidate in candidates:
        # With an empty PATH `which` would look in a default place that a subprocess does not.
        found = shutil.which(candidate, path=path) if path or os.sep in candidate else None
        if found is None:
            continue
        try:
            subprocess.run([found, "--version"], check=True, capture_output=True, timeout=20)
        except (OSError, subprocess.SubprocessError):
            continue
        return candidate
    return None


def _has_python_headers() -> bool:
    # The scheme that inductor and Triton ask for; a distribution's default may be another.
    folders = [sysconfig.get_path("include", scheme=f"{os.name}_prefix")]
    for variable in ("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH"):
        folders += [folder for folder in os.environ.get(variable, "").split(os.pathsep) if folder]
    return any((Path(folder) / "Python.h").exists() for folder in folders)


def _find_cc() -> str | None:
    """The C compiler with which Triton builds its launchers: $CC, gcc or clang."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")


def why_no_compile(device: str) -> str:
    """Why `torch.compile` cannot work on this device, or an empty text when it can."""
    if device == "cpu":
        if find_cxx() is None:
            return "no C++ compiler found"
    elif importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    elif _find_cc() is None:
        return "no C compiler found"
    if sys.platform != "win32" and not _has_python_headers():
        return "Python's C headers are not installed (python3-dev)"
    return ""


def why_no_triton(device: str, probe: Mapping[str, Any]) -> str:
    """Why the Triton kernels cannot run on this device, or an empty text when they can.

    Args:
        device: "cpu" or "cuda:N".
        probe: what `Engine.device_info` says of the device.
    """
    if device == "cpu":
        return "needs an NVIDIA GPU"
    if not probe.get("ready"):
        return "looking at the GPU"
    if probe.get("error"):
        return str(probe["error"])
    capability = tuple(probe.get("capability", (0, 0)))
    if capability < MIN_TRITON_CAPABILITY:
        need, have = (".".join(map(str, c)) for c in (MIN_TRITON_CAPABILITY, capability))
        return f"needs an NVIDIA GPU of compute capability {need} or newer, this one has {have}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return ""


def worker_env(device: str, threads: int, *, offline: bool) -> dict[str, str]:
    """The environment of a worker on `device`."""
    env = dict(os.environ)
    env |= {"HF_HUB_DISABLE_TELEMETRY": "1", "DISABLE_TELEMETRY": "1", "PYTHONUTF8": "1"}
    if offline:
        env |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if device == "cpu":
        env |= {
            **QUIET_THREADS,
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "CUDA_VISIBLE_DEVICES": "",
            # Compiling in the worker itself: helpers would each take 300 MiB and stay.
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        if cxx := find_cxx():
            env["CXX"] = cxx
    return env
