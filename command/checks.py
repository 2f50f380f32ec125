"""What is checked before any weights load: the user's files, the machine, the memory.

Each function raises ValueError with one line: what was got, what is allowed, what to do.  Used by
`generate.py`.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import psutil
import torch

from command import story
from memory import REFERENCE, Ops
from model import CPU_HAS_BF16, DTYPES
from sfi import SFIConfig


def read_prompt(name: str) -> str:
    """The text of a file, or of standard input: UTF-8, with or without BOM, line ends as \\n."""
    if name == "-" and sys.stdin is None:
        raise ValueError("--prompt -: standard input is closed; give a file")
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        text = data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except OSError as e:
        raise ValueError(
            f"--prompt {name}: {e.strerror.lower()}; give a readable text file, or - for standard input"
        ) from None
    except UnicodeDecodeError as e:
        raise ValueError(
            f"--prompt {name}: byte {e.start} is not UTF-8; allowed is UTF-8 text: convert the file"
        ) from None
    if not text.strip():
        raise ValueError(f"--prompt {name}: the text is empty; give a file with at least one word")
    return text


def read_prompts(args) -> list[str]:
    """The texts with their question, checked, and with the flags that go with them."""
    if args.prompt and args.prompt.count("-") > 1:
        raise ValueError("--prompt has - more than once; standard input can be read once")
    for flag, text in (("--question", args.question), ("--system", args.system)):
        if text and any("\ud800" <= c <= "\udfff" for c in text):
            raise ValueError(f"{flag} is not UTF-8; allowed is UTF-8 text")
        if text is not None and not text.strip():
            raise ValueError(f"{flag} is empty; give a text, or leave the flag out")
    if args.raw and (args.system is not None or args.no_thinking):
        name = "--no-thinking" if args.no_thinking else "--system"
        raise ValueError(f"{name} with --raw; it belongs to the chat template, which --raw leaves out")
    texts = [read_prompt(name) for name in args.prompt] if args.prompt else [story.story()]
    question = args.question if args.question is not None or args.prompt else story.QUESTION
    return [f"{text.strip()}\n\n{question}" if question else text for text in texts]


def check_output(flag: str, path: Path | None, endings: tuple, prompts: list[str]):
    """ValueError unless the file can be written; what is there stays as it is."""
    if path is None:
        return
    if path.suffix.lower() not in endings:
        raise ValueError(f"{flag} {path}; allowed is a file name that ends in {' or '.join(endings)}")
    if not path.parent.is_dir():
        raise ValueError(f"{flag} {path}: there is no folder {path.parent}; make it first")
    same = lambda name: os.path.samestat(path.stat(), os.fstat(0) if name == "-" else os.stat(name))
    if path.exists() and any(same(name) for name in prompts if name == "-" or os.path.exists(name)):
        raise ValueError(f"{flag} {path} is a --prompt too; give another file name")
    target = path.resolve()  # of a link that may lead nowhere yet
    new = not target.exists()
    try:
        target.open("ab").close()
    except OSError as e:
        raise ValueError(
            f"{flag} {path} cannot be written ({e.strerror.lower()}); give another file name"
        ) from None
    if new:
        target.unlink()


def check_plot(path: Path | None):
    """ValueError if a picture is wanted and matplotlib is not there."""
    if path is not None and find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib; pip install matplotlib, or leave the flag out")


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
    """The leaf operations to decode with; where `auto` cannot have Triton on a GPU it says so, once."""
    if name == "reference" or (name == "auto" and device.type == "cpu"):
        return REFERENCE
    problem = triton_problem(device, cfg)
    if problem is None:
        from kernels import triton_ops

        return triton_ops(device.type == "cuda")
    if name == "triton":
        raise ValueError(f"--backend triton: {problem}; or choose --backend reference")
    if not quiet:
        print(f"no optimized path: {problem}", file=sys.stderr)
    return REFERENCE


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


def check_memory(weights: int, cache: int, device: torch.device):
    """ValueError if so many bytes of weights and cache do not fit."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what torch keeps for later is free too
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    if weights + cache > free:
        parts = f"{weights / 1e9:.1f} weights + {cache / 1e9:.1f} cache"
        raise ValueError(
            f"needs {(weights + cache) / 1e9:.1f} GB ({parts}), this machine has {free / 1e9:.1f} GB free; "
            "choose a smaller model, a shorter prompt or a narrower --dtype"
        )
