"""The `cpu` backend's loops where `test_backends.py`, which holds them to the reference, does not look: half
precision, sizes around those of their blocks, numbers of threads, the compiled code on disk, and no Numba.

(NUMBA_DISABLE_JIT is of no use here: the intrinsics of `native.py` exist only as compiled code.)
"""

import os
import subprocess
import sys
import threading

import pytest
import torch

import loops
import model
import native
import selector_loops
from command.machine import choose_backend
from cpu import CPU
from sfi import SFIConfig
from tests.conftest import FLAGS, ROOT, run
from tests.test_backends import NAN, caches, equal

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HALF = DTYPES[1:]
COMPILED = [getattr(loops, name) for name in dir(loops) if name.endswith("_loop")]


@pytest.fixture(autouse=True)
def no_bf16_instructions(monkeypatch):
    """Where PyTorch would be asked, so that the loops compute on every processor."""
    monkeypatch.setattr(loops, "CPU_HAS_BF16", False)


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def rounded(got, exact, dtype):
    """Whether `got` is what rounding `exact`, fp64, to dtype gives, but for a sum's own error in fp32."""
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), exact, atol=1e-5, rtol=0.51 * torch.finfo(dtype).eps + 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n, size", [(1, 1), (3, 5), (63, 64), (65, 80), (131, 576)])
def test_linear(dtype, n, size, threads):
    """All numbers of rows up to beyond those that the loop takes; fewer rows of the weight than threads."""
    torch.manual_seed(0)
    weight = (torch.randn(n, size) * size**-0.5).to(dtype)  # as in a model: products of size 1
    bias = torch.randn(n).to(dtype)
    for rows in [*range(1, 10), 31, 32, 33]:
        x = torch.randn(rows, 1, size).to(dtype)
        got, want = loops.linear(x, weight), x.double() @ weight.double().T
        if (rows in (1, 2) and dtype == torch.float16) or rows > loops.FEW:  # PyTorch's
            torch.testing.assert_close(got.double(), want, atol=2e-2, rtol=2e-2)
        else:
            rounded(got, want, dtype)
            assert torch.equal(loops.linear(x, weight, bias), got + bias)


@pytest.mark.parametrize("T", [1, 4, 10])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attend(T, dtype, threads):
    """Lengths around a block's and around T, the rest of the cache NaN: every sum is as exact as in fp32."""
    torch.manual_seed(0)
    for length in [T, T + 1, 63, 64, 65, 127, 129, 200]:
        spans = [(5, length), (1, T), (0, 0)]
        q, (K, V) = torch.randn(3, T, 6, 80).to(dtype), caches(3, 2, 210, 80, spans, dtype)
        where = torch.tensor(spans).T.contiguous()
        for W in {1, T}:
            scores = torch.full((2, 3, 2, 3 * W, 205), NAN)
            want, _ = model.attend(q.double(), K.double(), V.double(), *where, scores[0])
            got, _ = loops.attend(q, K, V, *where, scores[1])
            equal(scores[1], scores[0], 1e-4)
            rounded(got, want, dtype)


def test_attend_of_large_and_of_equal_scores():
    """Softmax of scores of 1e4 and -1e4, whose exponentials would overflow, and of none but equal ones."""
    q, V = torch.ones(1, 1, 1, 16), torch.randn(1, 1, 150, 16)
    K = torch.linspace(-2500, 2500, 150)[None, None, :, None].expand(1, 1, 150, 16).contiguous()
    where = torch.tensor([0]), torch.tensor([150])
    equal(loops.attend(q, K, V, *where)[0], V[:, :, -1:])
    equal(loops.attend(q, K.flip(2), V, *where)[0], V[:, :, :1])
    equal(loops.attend(q, torch.ones_like(K), V, *where)[0], V.mean(2, keepdim=True))


def test_what_is_not_finite_stays_so():
    """A NaN or an infinity in K or V is in the output, in a weight's row in its number, and a Selector that
    meets one says so.
    """
    for bad in (NAN, float("inf")):
        K, V = torch.randn(2, 1, 1, 70, 16)
        V[0, 0, 66] = bad
        where = torch.tensor([0]), torch.tensor([70])
        assert not loops.attend(torch.randn(1, 1, 1, 16), K, V, *where)[0].isfinite().any()
        for dtype in DTYPES:
            weight = torch.ones(9, 32)
            weight[7, 3] = bad
            got = loops.linear(torch.ones(3, 32, dtype=dtype), weight.to(dtype))
            assert got.isfinite().sum() == 3 * 8 and not got[:, 7].isfinite().any()
            assert (
                not loops.swiglu(torch.full((2,), bad, dtype=dtype), torch.ones(2, dtype=dtype))
                .isfinite()
                .any()
            )
        scores = torch.randn(1, 1, 2, 50)
        scores[0, 0, 1, 20] = bad
        with pytest.raises(model.NotFinite):
            loops.select(
                scores, torch.ones(1, 1, 50), torch.zeros(1, 1, 50), torch.tensor([40]), 5, SFIConfig()
            )


@pytest.mark.parametrize("dtype", HALF)
def test_norm_rotate_and_swiglu_in_half_precision(dtype):
    """`test_backends.py` has fp32.  Two roundings where the reference has two: the normed number's own."""
    torch.manual_seed(0)
    x, weight, angle = torch.randn(2, 3, 5, 64).to(dtype), torch.randn(64).to(dtype), torch.rand(2, 3, 32)
    parts = model.PARTS
    rounded(loops.norm(x, weight, 1e-6), parts.norm(x.double(), weight.double(), 1e-6), dtype)
    up = torch.randn_like(x)
    rounded(loops.swiglu(4 * x, up), parts.swiglu(4 * x.double(), up.double()), dtype)
    for args in ((), (weight, 1e-6)):
        got = loops.rotate(x, angle.cos(), angle.sin(), *args)
        want = parts.rotate(x, angle.cos(), angle.sin(), *args)
        torch.testing.assert_close(got, want, atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize("dtype", HALF)
def test_numbers_are_stored_as_pytorch_rounds_them(dtype):
    """Every bf16 or fp16 number widened, and those between two narrowed: ties, infinities, NaN."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    every = every[every.isfinite()]
    one = torch.ones(1, 1, dtype=dtype)
    equal(loops.linear(every[:, None][:32], one), every[:, None][:32], 0)
    got = torch.cat([loops.linear(some[:, None], one) for some in every.split(loops.FEW)])
    assert torch.equal(got[:, 0], every)
    pairs = torch.randn(4096, 32, 2).to(dtype)
    got = torch.stack([loops.linear(x, torch.ones(1, 2, dtype=dtype)) for x in pairs])
    assert torch.equal(got[..., 0], (pairs[..., 0].float() + pairs[..., 1].float()).to(dtype))


def test_top_n_takes_the_lower_of_equal_ones():
    f = torch.tensor([0.5, 0.0, 0.25, 0.5, 0.25, 0.0, 0.25])
    out = torch.zeros(1, dtype=torch.int64)
    for n, want in [(1, [0]), (2, [0, 3]), (3, [0, 2, 3]), (4, [0, 2, 3, 4]), (6, [0, 1, 2, 3, 4, 6])]:
        out = torch.zeros(n, dtype=torch.int64)
        selector_loops.top_n(f.view(torch.int32).numpy(), out.numpy())
        assert out.tolist() == want


def test_select_gives_the_same_with_any_number_of_threads():
    torch.manual_seed(0)
    scores, past, before = 3 * torch.randn(2, 3, 4, 700), torch.rand(2, 3, 700), torch.get_num_threads()
    made = []
    for n in (1, 2, 3, 7):
        torch.set_num_threads(n)
        mine = past.clone()
        slots = loops.select(scores, torch.ones(2, 3, 700), mine, torch.tensor([600, 90]), 40, SFIConfig())
        made.append((slots, mine))
    torch.set_num_threads(before)
    for slots, mine in made:
        assert torch.equal(slots, made[0][0])
        equal(mine, made[0][1], 1e-6)


def test_select_refuses_more_than_there_are():
    args = torch.zeros(1, 1, 1, 30), torch.ones(1, 1, 30), torch.zeros(1, 1, 30), torch.tensor([20])
    with pytest.raises(ValueError, match="cannot select n = 17 of 16 candidates"):
        loops.select(*args, 17, SFIConfig(n_sink=4))


def test_a_worker_that_fails_is_an_error_not_a_wrong_answer():
    @native.part
    def divide(out, worker, workers):
        if worker == 0:
            raise ValueError
        out[worker] = 1

    @native.loop
    def whole(out, workers):
        native.share(divide, (out,), workers)

    with pytest.raises(RuntimeError, match="a worker of a loop failed"):
        whole(torch.zeros(4).numpy(), 2)


def test_prepare_compiles_all_and_nothing_compiles_later(tiny):
    """One compiled form a dtype, so that no step of a decode waits for the compiler."""
    from tests.naive import CONFIGS
    from tests.tiny import decoded, prompt

    for dtype in DTYPES:
        loops.prepare(dtype)
    forms = [len(f.signatures) for f in COMPILED]
    for dtype in DTYPES:
        decoded(tiny.to(dtype), CONFIGS["reread"], [prompt(60), prompt(9, 1)], 20, ops=loops.LOOPS)
    tiny.float()
    assert [len(f.signatures) for f in COMPILED] == forms
    assert {f.__name__: n for f, n in zip(COMPILED, forms, strict=True)} == {
        f.__name__: 1 if f.__name__ == "follow_loop" else 3 for f in COMPILED
    }


def test_a_loop_may_be_called_while_a_thread_prepares():
    x, weight = torch.randn(2, 3, 48).unbind(0)
    thread = threading.Thread(target=loops.prepare, args=(torch.float32,))
    thread.start()
    got = [loops.linear(x, weight) for _ in range(50)]
    thread.join()
    for y in got:
        equal(y, x @ weight.T)


HASHES = """
import hashlib, torch, loops
torch.manual_seed(0)
q, K, V = torch.randn(1, 4, 9, 64), *torch.randn(2, 1, 3, 500, 64)
scores, where = torch.zeros(1, 3, 12, 500), (torch.tensor([0]), torch.tensor([500]))
made = [loops.attend(q, K, V, *where, scores)[0], scores, loops.linear(q[0], K[0, 0])]
print(*(hashlib.md5(x.numpy().tobytes()).hexdigest() for x in made))
print(loops.attend_loop.stats)
"""


def python(code, **environ):
    environ = os.environ | {"NUMBA_NUM_THREADS": "1"} | environ
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environ)


@pytest.mark.slow
def test_the_first_run_and_later_ones_give_the_same_bits(tmp_path):
    """The code that has just been compiled and the one on disk: they once differed in the last bit."""
    first, second = (python(HASHES, NUMBA_CACHE_DIR=str(tmp_path)).stdout.splitlines() for _ in range(2))
    assert first[0] == second[0]
    assert "cache_hits=Counter()" in first[1] and "cache_misses=Counter()" in second[1]


@pytest.mark.slow
def test_a_command_that_must_compile_says_so_once_and_first(folder, tmp_path):
    """Not into the report or after an error, and not at all with --quiet or when the loops lie on disk."""
    (tmp_path / "text.txt").write_text("The sea was calm. " * 12)
    argv = [sys.executable, "generate.py", "--ckpt", folder, "--prompt", tmp_path / "text.txt", *FLAGS]
    runs = lambda cache, *more: subprocess.run(
        [*map(str, argv), *more],
        cwd=ROOT,
        env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / cache)},
        capture_output=True,
        text=True,
    )
    first, second, quiet = runs("a"), runs("a"), runs("b", "--quiet")
    assert first.returncode == second.returncode == quiet.returncode == 0 and not quiet.stderr
    assert first.stdout == second.stdout == quiet.stdout
    lines = [line.startswith("compiling loops") for line in first.stderr.splitlines()]
    assert lines.count(True) == 1 and lines.index(True) < 3 and "compiling" not in second.stderr


@pytest.mark.slow
def test_without_a_folder_for_compiled_code(tmp_path):
    """Neither beside the source nor in the user's cache: it compiles for each run."""
    code = "import numba.core.caching as c; c.CacheImpl._locator_classes = []\n" + HASHES
    done = python(code, NUMBA_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0 and "cache_hits=Counter()" in done.stdout, done.stderr
    full = (
        "import os; os.replace = lambda *a: (_ for _ in ()).throw(OSError(28, 'No space left on device'))\n"
    )
    done = python(full + HASHES, NUMBA_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0 and len(done.stdout.split()) > 3, done.stderr


@pytest.mark.slow
def test_no_loop_reaches_beyond_an_array(tmp_path):
    """The tests of this file and of the operations again, each index checked."""
    environ = os.environ | {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)}
    some = "not fails and not disk and not bits and not prepare and not thread"
    argv = [sys.executable, "-m", "pytest", "-q", "tests/test_loops.py", "-k", some]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, env=environ)
    assert done.returncode == 0, done.stdout[-2000:]


def test_without_numba(monkeypatch, capsys, folder, tmp_path):
    """`auto` says so once and takes PyTorch's operations; `--backend cpu` is an error in one line."""
    monkeypatch.setitem(sys.modules, "loops", None)
    (tmp_path / "text.txt").write_text("The sea was calm. " * 12)
    argv = ["--ckpt", folder, "--prompt", tmp_path / "text.txt", *FLAGS]
    out, err, code = run(capsys, *argv, "--backend", "cpu")
    assert code == 2 and not out and err.count("\n") == 1
    assert "--backend cpu: Numba cannot compile here (" in err
    assert "pip install numba; or choose --backend reference" in err
    out, err, code = run(capsys, *argv)
    assert code == 0 and out and err.count("no optimized path: Numba cannot compile here") == 1
    assert choose_backend("auto", torch.device("cpu"), SFIConfig(), quiet=True) is CPU


def test_without_pytorchs_openmp(monkeypatch, tmp_path):
    """A PyTorch that is linked to another library, or to one without what is called."""
    monkeypatch.setattr(native.torch, "__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(ImportError, match="no OpenMP library of its own"):
        native.find_openmp()
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libgomp.so").write_bytes(b"")
    with pytest.raises(ImportError, match="OpenMP library cannot be loaded"):
        native.find_openmp()
