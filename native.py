"""What Numba's loops lack: bf16 and fp16 numbers, a fast power of two, prefetching, and PyTorch's threads.

Numba has thread pools of its own, but two pools in one process are slow: the threads of the one that has just
ended keep their cores busy waiting, while the other's want to run (measured: 28 % lost).  So `share` runs a
function on the threads that PyTorch uses, by a call to the OpenMP library that lies in PyTorch's folder.
`loops.py` and `selector_loops.py` are written with these.
"""

import contextlib
import ctypes
from pathlib import Path

import llvmlite.binding as llvm
import numba
import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

if numba.config.CPU_FEATURES is None:  # LLVM would use half of AVX-512's width
    numba.config.CPU_FEATURES = llvm.get_host_cpu_features().flatten() + ",-prefer-256-bit"

FAST = {"reassoc", "contract", "arcp", "nsz", "afn"}  # sums in any order; NaN and infinity stay what they are
SETTINGS = dict(fastmath=FAST, error_model="numpy")  # a division by zero gives infinity or NaN
# A part is called by loops.  Not inlined, the code of a run that compiles and of one that finds it on disk
# would differ, and so the last bit of a sum.
part = njit(**SETTINGS, forceinline=True)
LOG2E, LN2 = np.float32(np.log2(np.e)), np.float32(np.log(2))
ZERO, HALF, ONE = map(np.float32, (0, 0.5, 1))  # a whole number would make the result fp64
FILES = "native.py", "loops.py", "selector_loops.py", "selector.py"
SOURCES = [Path(__file__).with_name(name).stat() for name in FILES]


def loop(f):
    """Make f, which Python calls, compile at its first call; kept on disk where a folder can be written, and
    until one of SOURCES changes (Numba by itself looks at f's file; parts and constants come from others).
    """
    try:
        made = njit(**SETTINGS, cache=True)(f)
        made._cache._cache_file._source_stamp = [(s.st_mtime, s.st_size) for s in SOURCES]
        save = made._cache.save_overload
    except (RuntimeError, AttributeError):  # neither the source's folder nor the user's cache; another Numba
        return njit(**SETTINGS)(f)

    def save_if_possible(*compiled):
        with contextlib.suppress(OSError):  # the disk is full
            save(*compiled)

    made._cache.save_overload = save_if_possible
    return made


def find_openmp():
    """Let compiled code call PyTorch's OpenMP library; ImportError where there is none that can be called."""
    names = ("libgomp", "libomp", "libiomp")
    found = [f for f in Path(torch.__file__).parent.glob("lib/*omp*") if f.name.startswith(names)]
    if not found:
        raise ImportError("this PyTorch has no OpenMP library of its own")
    try:
        library = ctypes.CDLL(str(found[0]))
    except OSError as e:
        raise ImportError(f"PyTorch's OpenMP library cannot be loaded: {e}") from None
    for name in ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads"):
        if not hasattr(library, name):
            raise ImportError(f"PyTorch's OpenMP library {found[0].name} has no {name}")
        llvm.add_symbol(name, ctypes.cast(getattr(library, name), ctypes.c_void_p).value)


find_openmp()


@intrinsic
def share(context, work, args, workers):
    """Call work(*args, worker, workers) on so many of PyTorch's threads, or fewer; `work` is a `part`.

    A parallel region as C compilers make it: the arguments lie in a box on the stack, and a small function
    gets the box's address on every thread.  Where a worker raises, all end and then this raises.
    """
    kinds = (*args, types.intp, types.intp)
    work.get_call_type(context, kinds, {})

    def generate(context, builder, signature, values):
        overload, byte, int32 = work.dispatcher.overloads[kinds], ir.IntType(8).as_pointer(), ir.IntType(32)
        context.active_code_library.add_linking_library(overload.library)
        failed = cgutils.alloca_once_value(builder, ir.Constant(int32, 0))
        box = cgutils.alloca_once_value(builder, cgutils.pack_struct(builder, [values[1], failed]))

        region = ir.FunctionType(ir.VoidType(), [byte])
        region = ir.Function(builder.module, region, builder.module.get_unique_name("region"))
        region.linkage = "internal"
        inside = ir.IRBuilder(region.append_basic_block("entry"))
        given, flag = cgutils.unpack_tuple(inside, inside.load(inside.bitcast(region.args[0], box.type)))
        ask, names = ir.FunctionType(int32, []), ("omp_get_thread_num", "omp_get_num_threads")
        ask = [cgutils.get_or_insert_function(builder.module, ask, name) for name in names]
        numbers = [inside.sext(inside.call(number, []), ir.IntType(64)) for number in ask]
        given = [*cgutils.unpack_tuple(inside, given), *numbers]
        status, _ = context.call_internal_no_propagate(inside, overload.fndesc, overload.signature, given)
        with inside.if_then(status.is_error):
            inside.store(ir.Constant(int32, 1), flag)
        inside.ret_void()

        parallel = ir.FunctionType(ir.VoidType(), [region.type, byte, int32, int32])
        parallel = cgutils.get_or_insert_function(builder.module, parallel, "GOMP_parallel")
        workers = builder.trunc(values[2], int32)
        builder.call(parallel, [region, builder.bitcast(box, byte), workers, ir.Constant(int32, 0)])
        with builder.if_then(builder.icmp_signed("!=", builder.load(failed), ir.Constant(int32, 0))):
            context.call_conv.return_user_exc(builder, RuntimeError, ("a worker of a loop failed",))
        return context.get_dummy_value()

    return types.void(work, args, types.intp), generate


@intrinsic
def widen(context, x):
    """A stored number as fp32: uint16 holds bf16, int16 fp16, float32 is itself."""

    def generate(context, builder, signature, args):
        [x], word = args, ir.IntType(32)
        if signature.args[0] == types.uint16:  # the upper half of an fp32 number
            return builder.bitcast(builder.shl(builder.zext(x, word), ir.Constant(word, 16)), ir.FloatType())
        if signature.args[0] == types.int16:
            return builder.fpext(builder.bitcast(x, ir.HalfType()), ir.FloatType())
        return x

    return types.float32(x), generate


@intrinsic
def narrow(context, x, dtype):
    """An fp32 number as it is stored in an array of that dtype; to the nearest, to even in the middle."""
    stored, word = dtype.dtype, ir.IntType(32)

    def generate(context, builder, signature, args):
        x = args[0]
        if stored == types.uint16:
            bits, number = builder.bitcast(x, word), lambda n: ir.Constant(word, n)
            even = builder.and_(builder.lshr(bits, number(16)), number(1))
            bits = builder.lshr(builder.add(bits, builder.add(even, number(0x7FFF))), number(16))
            bits = builder.select(builder.fcmp_unordered("uno", x, x), number(0x7FC0), bits)
            return builder.trunc(bits, ir.IntType(16))
        if stored == types.int16:
            return builder.bitcast(builder.fptrunc(x, ir.HalfType()), ir.IntType(16))
        return x

    return stored(types.float32, dtype), generate


@intrinsic
def from_bits(context, x):
    """The fp32 number with these bits, an int32."""
    generate = lambda context, builder, signature, args: builder.bitcast(args[0], ir.FloatType())
    return types.float32(types.int32), generate


@part
def exp2(x):
    """2^x in fp32, x <= 0, to 1e-7; below 2^-126.5 it is 0.  LLVM would call a function for every number."""
    x = max(x, np.float32(-127))
    whole = np.rint(x)
    y = x - whole  # in [-1/2, 1/2]: Taylor's series of 2^y
    p = np.float32(1.5403530e-4)
    p = p * y + np.float32(1.3333558e-3)
    p = p * y + np.float32(9.6181291e-3)
    p = p * y + np.float32(5.5504109e-2)
    p = p * y + np.float32(2.4022651e-1)
    p = p * y + np.float32(6.9314718e-1)
    p = p * y + ONE
    return p * from_bits((np.int32(whole) + np.int32(127)) << np.int32(23))


@intrinsic
def ask_for(context, x, i, j):
    """Have the processor fetch the part of a matrix around x[i, j], which may lie beyond its end."""

    def generate(context, builder, signature, args):
        kind, (x, *indices) = signature.args[0], args
        x = context.make_array(kind)(context, builder, x)
        shape, strides = (cgutils.unpack_tuple(builder, numbers) for numbers in (x.shape, x.strides))
        place = cgutils.get_item_pointer2(context, builder, x.data, shape, strides, kind.layout, indices)
        place = builder.bitcast(place, ir.IntType(8).as_pointer())
        numbers = [ir.Constant(ir.IntType(32), n) for n in (0, 3, 1)]  # to read, into all caches, data
        signature = ir.FunctionType(ir.VoidType(), [place.type, *(n.type for n in numbers)])
        fetch = cgutils.get_or_insert_function(builder.module, signature, "llvm.prefetch.p0")
        builder.call(fetch, [place, *numbers])
        return context.get_dummy_value()

    return types.void(x, types.intp, types.intp), generate
