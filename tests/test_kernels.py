"""The Triton kernels against the reference, the schedule of streams against doing all at once, and the
captured step against running it anew.  On a CPU the kernels run in Triton's interpreter, in fp32, because its
bfloat16 is not exact; on a GPU the same tests run on it.
"""

import copy
import os
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import model
import selector
import sfi
from command.machine import choose_backend
from loops import LOOPS
from memory import REFERENCE
from study.forcing import force
from tests.conftest import ROOT, run
from tests.naive import CONFIGS
from tests.test_backends import caches, equal
from tests.tiny import SMALL, prompt, token_text

pytest.importorskip("triton", reason="Triton is not installed")
import kernels
import selector_kernels

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # log(0) is -inf, meant so
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
NAN = float("nan")


def test_attend_over_many_splits(monkeypatch):
    """More splits than blocks of tokens: some are empty, one is cut."""
    monkeypatch.setattr(kernels, "attend_sizes", lambda *_: dict(ROWS=16, BLOCK=16))
    torch.manual_seed(0)
    spans = [(0, 300), (100, 18)]
    q, (K, V) = torch.randn(2, 1, 2, 64, device=DEVICE), caches(2, 1, 320, 64, spans).to(DEVICE)
    start, length = torch.tensor(spans, device=DEVICE).T.contiguous()
    equal(kernels.attend(q, K, V, start, length)[0], model.attend(q, K, V, start, length)[0])


def test_ties_go_to_the_lower_position():
    """Also across blocks, where each has to know how many ties the ones before it took."""
    score = torch.zeros(1, 2, 3000, device=DEVICE)
    score[0, 0, [5, 1500, 2999]] = 1.0
    score[0, 1, 2000:] = 0.5
    got = selector_kernels.top_n(score, 1030)[0].tolist()
    for row, slots in zip(score[0], got, strict=True):
        assert slots == selector.top_n(row[None], 1030)[0].tolist()


def test_follow_without_any_attention(monkeypatch):
    """Extreme scores: one token has all the attention, the rest underflow to 0."""
    scores = torch.full((1, 2, 2, 400), -1e4, device=DEVICE)
    scores[..., 7] = 1e4
    cfg, recent_start = sfi.SFIConfig(n_sink=0), torch.tensor([390], device=DEVICE)
    for name in ("follow", "paper"):
        args = (
            torch.rand(1, 2, 400, device=DEVICE) + 0.5,
            torch.zeros(1, 2, 400, device=DEVICE),
            recent_start,
            30,
        )
        want, got = (s.select(scores, *args, replace(cfg, selector=name)) for s in (selector, kernels))
        assert torch.equal(want, got), name


CONFIGS = CONFIGS | {"exact": replace(SMALL, exact=True, draft_cost=0.0)}


def engine(tiny, cfg, ops, **sizes):
    return sfi.Engine(copy.deepcopy(tiny).to(DEVICE), cfg, token_text, ops=ops, **sizes)


def decoded(tiny, cfg, ops, prompts, new):
    """Tokens and reasons of every step."""
    made = engine(tiny, cfg, ops, batch=len(prompts), max_length=max(map(len, prompts)) + new, new_tokens=new)
    steps = sfi.decode(made, prompts, max_new_tokens=new)
    return [(step.tokens, [did.reason for did in step.rows]) for step in steps]


@pytest.mark.slow
def test_forced_tokens(small):
    """Several tokens a pass, over the full cache and over the memory."""
    ops, logits = kernels.triton_ops(DEVICE == "cuda"), []
    for some in (REFERENCE, ops):
        made = engine(small, SMALL, some, max_length=50, new_tokens=14)
        made.prefill(0, prompt(32), chunk=16)
        logits.append(torch.cat([some for some, _ in force(made, 0, prompt(14, 2))]))
    equal(logits[1], logits[0], 1e-4)


class Streams:
    """Stands in for torch.cuda: the main stream runs at once, the side stream as late as it may, when the
    main stream waits for an event behind its work.  So what the main stream touches too early is wrong.
    """

    def __init__(self):
        self.waiting, self.main, self.log = [], Stream(self, "main"), []
        self.on = self.main

    def Stream(self):
        return Stream(self, "side")

    def Event(self):
        return Event()

    def current_stream(self):
        return self.on

    @contextmanager
    def stream(self, stream):
        self.on = stream
        yield
        self.on = self.main

    def run_until(self, event):
        while event in [e for e, _ in self.waiting]:
            done, work = self.waiting.pop(0)
            self.log.append(done)
            work()


class Event:
    def record(self, stream):
        if stream.name == "side":
            stream.cuda.waiting.append((self, stream.work))
        else:
            self.ready = True


class Stream:
    def __init__(self, cuda, name):
        self.cuda, self.name, self.waits = cuda, name, 0

    def wait_event(self, event):
        if self.name == "main":
            self.cuda.run_until(event)
        else:
            assert event.ready, "the side stream must wait for an event recorded on the main one"
            self.waits += 1


class Late(kernels.Overlap):
    """`Overlap` on the stand-ins: a refresh is kept for later instead of launched."""

    def __init__(self, layers):
        super().__init__(layers, Streams())

    def refresh(self, layer, work, tensors):
        before = self.side.waits
        self.side.work = work
        kept = [t for t in tensors if isinstance(t, torch.Tensor)]
        super().refresh(layer, lambda: None, [Recorded(self.side) for _ in kept])
        assert self.side.waits == before + 1


class Recorded:
    def __init__(self, side):
        self.side = side

    def record_stream(self, stream):
        assert stream is self.side


@pytest.mark.parametrize("name", ["sentence-follow", "sentence-paper", "one-by-one", "window", "exact"])
def test_overlap_changes_no_token(tiny, name):
    """However late the side stream runs."""
    late, prompts = REFERENCE._replace(schedule=Late), [prompt(40), prompt(61, 1)]
    assert decoded(tiny, CONFIGS[name], late, prompts, 30) == decoded(
        tiny, CONFIGS[name], REFERENCE, prompts, 30
    )


class NoWait(Late):
    def wait_for(self, layer):
        pass


class OneBuffer(Late):
    def scores_buffer(self, shape, device):
        self.read = [None, None]
        self.turn = 0
        return super().scores_buffer(shape, device)


@pytest.mark.parametrize("broken", [NoWait, OneBuffer])
def test_a_broken_schedule_is_seen(tiny, broken):
    """Without the wait for a layer's refresh, or with scores overwritten before they are read, the test above
    fails.
    """
    late, prompts = REFERENCE._replace(schedule=broken), [prompt(40), prompt(61, 1)]
    want = decoded(tiny, SMALL, REFERENCE, prompts, 30)
    try:
        got = decoded(tiny, SMALL, late, prompts, 30)
    except (ValueError, RuntimeError) as e:  # memory read before it was written may hold anything
        got = e
    assert got != want


def test_fork_waits_for_the_side_stream(tiny):
    late = REFERENCE._replace(schedule=Late)
    logits = []
    for ops in (REFERENCE, late):
        made = engine(tiny, SMALL, ops, max_length=90, new_tokens=24)
        made.prefill(0, prompt(60))
        other = made.fork(SMALL)
        assert other.cache.past.abs().sum() > 0
        logits.append(other.prefill(0, prompt(9, 3))[0])
    assert torch.equal(*logits)


class Replayed:
    """Stands in for a CUDA graph: what the first pass read of the host stays as it was."""

    made = 0

    def __init__(self, forward, *inputs):
        Replayed.made += 1
        self.forward, self.inputs = forward, [x.clone() for x in inputs]
        forward(*self.inputs)

    def __call__(self, *inputs):
        for mine, given in zip(self.inputs, inputs, strict=True):
            mine.copy_(given)
        return self.forward(*self.inputs)


@pytest.mark.parametrize("name", ["sentence-follow", "window", "never", "exact"])
def test_captured_steps_depend_on_their_inputs_alone(tiny, name):
    """One capture serves all fast steps, whatever the lengths, and with a row that has ended."""
    Replayed.made, prompts = 0, [prompt(40), prompt(61, 1)]
    ops = REFERENCE._replace(capture=Replayed)
    want = decoded(tiny, CONFIGS[name], REFERENCE, prompts, 30)
    assert decoded(tiny, CONFIGS[name], ops, prompts, 30) == want
    assert Replayed.made == 1


@pytest.mark.parametrize("prompts", [[[5], [7]], [[5], prompt(9)]], ids=len)
def test_a_prompt_of_one_token_is_not_a_step_of_the_batch(tiny, prompts):
    """It once took the captured step's place, or ran as a replay of another row's."""
    want = decoded(tiny, SMALL, REFERENCE, prompts, 6)
    assert decoded(tiny, SMALL, REFERENCE._replace(capture=Replayed), prompts, 6) == want


def test_experts_are_not_captured(tiny):
    moe = copy.copy(tiny)
    moe.config = replace(tiny.config, num_experts=4)
    made = sfi.Engine(moe, SMALL, token_text, ops=REFERENCE._replace(capture=1), max_length=9, new_tokens=1)
    assert made.capture is None


def test_backend_is_chosen_once_and_said(monkeypatch, capsys):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    assert choose_backend("auto", CPU, SMALL) is LOOPS
    assert choose_backend("reference", CUDA, SMALL) is REFERENCE
    assert choose_backend("auto", CUDA, SMALL).name == "triton"
    assert not capsys.readouterr().err
    with pytest.raises(ValueError, match="^--backend cpu: it runs on a CPU; add --device cpu"):
        choose_backend("cpu", CUDA, SMALL)
    monkeypatch.setitem(
        selector.SELECTORS, "toy", selector.Selector(lambda scores, *_: -scores[:, 0], (), {})
    )
    toy = replace(SMALL)
    object.__setattr__(toy, "selector", "toy")  # as if it were one of the choices
    assert choose_backend("auto", CUDA, toy) is REFERENCE
    assert capsys.readouterr().err == (
        "no optimized path: there are no kernels for selector toy; give one of follow, paper\n"
    )
    with pytest.raises(ValueError, match="^--backend triton: there are no kernels for selector toy"):
        choose_backend("triton", CUDA, toy)
    with pytest.raises(ValueError, match="it needs a CUDA device, or TRITON_INTERPRET=1"):
        choose_backend("triton", CPU, SMALL)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (7, 5))
    with pytest.raises(ValueError, match="compute capability 8.0"):
        choose_backend("triton", CUDA, SMALL)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match="unset it"):
        choose_backend("triton", CUDA, SMALL)
    monkeypatch.setattr("command.machine.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="Triton is not installed"):
        choose_backend("triton", CUDA, SMALL)
    assert choose_backend("auto", CUDA, SMALL) is REFERENCE
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="a GPU needs no interpreter")
def test_command(folder, tmp_path, capsys):
    (file := tmp_path / "text.txt").write_text("The sea was calm.")
    argv = ["--ckpt", folder, "--prompt", file, "--n-select", 9, "--n-recent", 16]
    argv += ["--max-new-tokens", 4, "--device", "cpu", "--dtype", "float32"]
    want = run(capsys, *argv)
    got = run(capsys, *argv, "--backend", "triton")
    assert got[0] == want[0] and "triton backend" in got[1] and "cpu backend" in want[1]


@pytest.mark.slow
def test_every_kernel_compiles_for_gpus():
    """Of three generations, without one: nothing spills, and K, V and queries come 16 bytes at a time (the
    two other loads are the row's start and length).
    """
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "study.compile"], capture_output=True, text=True, cwd=ROOT, env=env
    )
    assert done.returncode == 0, done.stderr[-2000:]
    seen = {}
    for line in done.stdout.splitlines()[1:]:
        name, *_, target, registers, stack, shared, wide, other = line.split()
        seen.setdefault(name, set()).add(target)
        assert int(stack) == 0 and 0 < int(registers) <= 255 and int(shared) < 160_000, line
        if name == "attend_kernel":
            assert int(wide) > 0 and int(other) == 2, line
    every = {n for m in (kernels, selector_kernels) for n in vars(m) if n.endswith("_kernel")}
    assert seen == {name: {"80", "90", "100"} for name in every}


def test_one_host_read_a_step(small, monkeypatch):
    """Fast or slow: what the project's own code reads of a tensor, per step, is the tokens."""
    made = engine(small, SMALL, kernels.triton_ops(DEVICE == "cuda"), max_length=60, new_tokens=14)
    made.prefill(0, prompt(30))
    reads = []

    def counting(name, method):
        def read(tensor, *args):
            frame = sys._getframe(1)
            if ROOT in Path(frame.f_code.co_filename).parents:
                reads.append((name, frame.f_code.co_name))
            return method(tensor, *args)

        return read

    for name in (
        "tolist",
        "item",
        "cpu",
        "numpy",
        "nonzero",
        "__bool__",
        "__int__",
        "__index__",
        "__float__",
    ):
        monkeypatch.setattr(torch.Tensor, name, counting(name, getattr(torch.Tensor, name)))
    reasons = set()
    for token in (0, 1, 2, 3, 4, 5, 6, 7):
        logits, did = made.step([token])
        made.pick(logits)
        reasons.add(did[0].reason)
        assert reads == [("tolist", "draw")]
        reads.clear()
    assert len(reasons) == 2
