"""What runs where: device, dtype and backend, and whether the model and its cache fit.

Each function raises ValueError with one line: what was got, what is allowed, what to do.  Used by
`generate.py` and the measurements.
"""

import os
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

import psutil
import torch

from cpu import CPU, CPU_HAS_BF16
from memory import REFERENCE, Ops
from model import DTYPES, ModelConfig
from sfi import SFIConfig


def choose_device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "--device cuda: PyTorch sees no CUDA device here; use --device cpu, or another torch"
        )
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    if name != "auto":
        return DTYPES[name]
    return torch.bfloat16 if device.type == "cuda" or CPU_HAS_BF16 else torch.float32


def choose_backend(name: str, device: torch.device, cfg: SFIConfig, quiet=False) -> Ops:
    """The operations to decode with; where `auto` cannot have Triton on a GPU it says so, once."""
    wanted = name if name != "auto" else "cpu" if device.type == "cpu" else "triton"
    try:
        return BACKENDS[wanted](device, cfg)
    except ValueError as why:
        if name != "auto":
            raise ValueError(f"--backend {name}: {why}; or choose --backend reference") from None
        if not quiet:
            print(f"no optimized path: {why}", file=sys.stderr)
        return CPU if wanted == "cpu" else REFERENCE


def cpu_backend(device: torch.device, cfg: SFIConfig) -> Ops:
    if device.type != "cpu":
        raise ValueError("it runs on a CPU; add --device cpu")
    try:
        from loops import LOOPS
    except ImportError as e:
        raise ValueError(f"Numba cannot compile here ({e}); pip install numba") from None
    return LOOPS


def prepare(ops: Ops, dtype: torch.dtype, quiet=False):
    """Begin to compile what the backend needs, in a thread, while the model loads; one line if it must."""
    if ops.name == "cpu" and ops is not CPU:
        from loops import must_compile, prepare

        if must_compile(dtype) and not quiet:
            line = "compiling loops for this processor while the model loads, once, for 10 to 20 s"
            print(line, file=sys.stderr, flush=True)
        threading.Thread(target=prepare, args=(dtype,), daemon=True).start()


def triton_backend(device: torch.device, cfg: SFIConfig) -> Ops:
    if problem := triton_problem(device, cfg):
        raise ValueError(problem)
    from kernels import triton_ops

    return triton_ops(device.type == "cuda")


def triton_problem(device: torch.device, cfg: SFIConfig) -> str | None:
    """Why the Triton kernels cannot run; None if they can."""
    if find_spec("triton") is None:
        return "Triton is not installed (it comes with CUDA builds of torch for Linux); pip install triton"
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "it needs a CUDA device, or TRITON_INTERPRET=1 in the environment to be interpreted, slowly"
    if device.type == "cuda" and os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET is set, which runs kernels on a CPU; unset it"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs a GPU of compute capability 8.0 (A100) or newer"
    from selector_kernels import unsupported

    return unsupported(cfg)


BACKENDS = {  # name -> (device, cfg) -> Ops, or a ValueError that says why it cannot run
    "reference": lambda device, cfg: REFERENCE,
    "cpu": cpu_backend,
    "triton": triton_backend,
}


def cache_bytes(
    model: ModelConfig, cfg: SFIConfig, *, batch: int, max_length: int, new_tokens: int, dtype: torch.dtype
) -> int:
    """Bytes the engine allocates: K and V of full cache and compact memory, and two fp32 numbers a key."""
    slots = cfg.capacity(max_length, new_tokens) + max_length
    numbers = 2 * model.num_hidden_layers * model.num_key_value_heads * max_length  # key_norm and past
    return batch * (model.kv_bytes(dtype) * slots + 4 * numbers)


def check_memory(weights: int, cache: int, device: torch.device):
    """ValueError if so many bytes of weights and cache do not fit."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what torch keeps for later is free too
        free, where = torch.cuda.mem_get_info(device)[0], "GPU"
    else:
        free, where = psutil.virtual_memory().available, "machine"
        limit = container_memory()
        if limit is not None and limit < free:
            free, where = limit, "container"
    if weights + cache > free:
        parts = f"{weights / 1e9:.1f} weights + {cache / 1e9:.1f} cache"
        raise ValueError(
            f"needs {(weights + cache) / 1e9:.1f} GB ({parts}), this {where} has {free / 1e9:.1f} GB free; "
            "choose a smaller model, a shorter prompt or a narrower --dtype"
        )


def container_memory(root=Path("/")) -> int | None:
    """Bytes that a container (control groups, version 1 or 2) lets this process still take; None: any."""
    free = []
    for group in control_groups("memory", root):
        limit = read_number(group / "memory.max", group / "memory.limit_in_bytes")
        used = read_number(group / "memory.current", group / "memory.usage_in_bytes")
        if limit is not None and used is not None:
            free.append(max(limit - used + file_cache(group), 0))
    return min(free, default=None)


def container_cores(root=Path("/")) -> int | None:
    """Processor cores that a container lets this process use, rounded up; None: no limit."""
    cores = []
    for group in control_groups("cpu", root):
        try:  # version 2: "quota period", or "max period"
            quota, period = (group / "cpu.max").read_text().split()
        except (OSError, ValueError):
            quota, period = read_number(group / "cpu.cfs_quota_us"), read_number(group / "cpu.cfs_period_us")
        if str(quota).isdigit() and period and int(quota) > 0:
            cores.append(-(-int(quota) // int(period)))
    return min(cores, default=None)


def control_groups(controller: str, root: Path) -> list[Path]:
    """The folders of this process's control group and of those that hold it."""
    try:
        lines = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return []
    found = []
    for number, controllers, path in (line for line in lines if len(line) == 3):
        top = root / "sys/fs/cgroup"
        if number != "0" and controller not in controllers.split(","):
            continue
        top = top if number == "0" else top / controller
        group = top / path.strip("/")
        found += [folder for folder in (group, *group.parents) if folder == top or top in folder.parents]
    return found


def read_number(*files: Path) -> int | None:
    """The number in the first of the files that is there; None for "max" and the like."""
    for file in files:
        try:
            return int(file.read_text())
        except (OSError, ValueError):
            continue
    return None


def file_cache(group: Path) -> int:
    """Bytes of a control group's memory that hold files, and are given back when others need them."""
    try:
        pairs = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return int(pairs.get("inactive_file", pairs.get("total_inactive_file", 0)))
    except (OSError, ValueError):
        return 0


def use_allowed_cores():
    """Let PyTorch use no more threads than a container has cores, unless OMP_NUM_THREADS says how many."""
    cores = container_cores()
    if cores and cores < torch.get_num_threads() and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(cores)
