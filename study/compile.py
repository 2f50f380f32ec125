"""What every Triton kernel needs on three GPUs, found without one: registers, stack, shared memory, loads.

    python -m study.compile

Every kernel is compiled as it would be for an A100, an H100 and a B200, in bfloat16 and float32; nothing
runs.  Read before: `kernels.py`.
"""

import re
import subprocess
import sys
from functools import partial
from itertools import chain
from multiprocessing import Pool
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget

from kernels import append, attend, rebuild, select
from selector_kernels import KERNELS
from sfi import SFIConfig

TARGETS = 80, 90, 100  # A100, H100, B200
SHAPES = (torch.bfloat16, 2, 128), (torch.float32, 2, 64), (torch.bfloat16, 16, 128), (torch.bfloat16, 5, 80)
CASES = [(shape, T, True) for shape in SHAPES for T in (500, 1)]  # each some (shape, T, refreshed)
CASES += [(SHAPES[i], T, False) for i, T in ((0, 500), (0, 1), (3, 500))]
USED = re.compile(r"REG:(\d+) STACK:(\d+)")
LOAD = re.compile(r"\bld\.global\S*?(?:\.v(\d))?\.[a-z](\d+)\s|\bcp\.async\.c[ag]\.\S+ \[[^,]+,[^,]+, *(\w+)")


def launch_all(shape, T: int, refreshed: bool, n_kv=8):
    """What a layer launches in a pass of T tokens, on tensors that hold no data.  shape: dtype, G, D; only
    attention runs beside the first, Qwen3-0.6B's.
    """
    (dtype, G, D), cfg, S = shape, SFIConfig(), 32781  # as T and S may be anything, neither is 16 n
    W, cap, new = min(T, cfg.n_evidence), cfg.capacity(S, S), partial(torch.empty, device="meta")
    K, V = new(2, 1, n_kv, cap + S, D, dtype=dtype)
    key_norm, past = new(2, 1, n_kv, S)
    position = start = length = memory = recent_start = new(1, dtype=torch.int64)
    scores = new(1, n_kv, G * W, S) if refreshed else None
    attend(new(1, T, n_kv * G, D, dtype=dtype), K, V, start, length, scores)
    if refreshed and shape == SHAPES[0]:
        append(*new(2, 1, T, n_kv, D, dtype=dtype), K, V, key_norm, position, memory)
        for name in KERNELS:
            cfg = SFIConfig(selector=name, fusion="arithmetic" if T == 1 else "geometric")
            slots = select(scores, key_norm, past, recent_start, cfg.budget, cfg)
            rebuild(K, V, slots, cap, cfg.n_sink, recent_start, length)


def describe(kernel) -> dict:
    """A row of the table, from a compiled kernel's PTX and its binary: only ptxas knows the registers."""
    names, used = kernel.src.fn.arg_names, kernel.metadata
    values = {names[i]: value for (i,), value in kernel.src.constants.items() if not isinstance(value, str)}
    dtype = kernel.src.signature[names[0]].removeprefix("*")
    label = [kernel.name, dtype, *(f"{k}={v}" for k, v in values.items()), f"warps={used.num_warps}"]
    tool = triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage"
    binary = kernel.metadata_group[f"{kernel.name}.cubin"]
    registers, stack = USED.search(subprocess.check_output([*tool, binary], text=True)).groups()
    loads = LOAD.findall(kernel.asm["ptx"])
    sizes = [int(copied, 0) if copied else int(n or 1) * int(bits) // 8 for n, bits, copied in loads]  # bytes
    wide = sum(size >= 16 for size in sizes)
    return dict(
        kernel=" ".join(label), target=used.target.arch, registers=int(registers), stack=int(stack),
        shared=used.shared, wide_loads=wide, other_loads=len(sizes) - wide,
    )  # fmt: skip


def compile_case(arch: int, case) -> list[dict]:
    """Rows of what `launch_all(*case)` launches: each kernel compiles as it would on that GPU, and stays."""
    rows, target = [], GPUTarget("cuda", arch, 32)
    launch = lambda kernel, grid, *args, **kw: rows.append(describe(kernel.warmup(*args, grid=grid, **kw)))
    triton.JITFunction.__getitem__ = lambda kernel, grid: partial(launch, kernel, grid)
    driver = dict(current_target=lambda: target, current_device=lambda: arch, current_stream=lambda device: 0)
    triton.runtime.driver.set_active(SimpleNamespace(**{f"get_{k}": v for k, v in driver.items()}))
    launch_all(*case)
    return rows


def compile_table(targets=TARGETS) -> list[dict]:
    """What every kernel needs on GPUs of these compute capabilities; none is needed.  In other processes, as
    `compile_case` leaves Triton unable to launch.
    """
    with Pool() as pool:
        rows = chain(*pool.starmap(compile_case, [(arch, case) for case in CASES for arch in targets], 1))
    rows = {tuple(row.values()): row for row in rows}  # cases share kernels
    return sorted(rows.values(), key=lambda row: (row["kernel"], row["target"]))


if __name__ == "__main__":
    if triton.knobs.runtime.interpret:
        sys.exit("TRITON_INTERPRET is set, so there is nothing to compile: unset it")
    rows = compile_table()
    for row in [{name: name for name in rows[0]}, *rows]:
        print("{:84} {:>6} {:>9} {:>5} {:>6} {:>10} {:>11}".format(*row.values()))
