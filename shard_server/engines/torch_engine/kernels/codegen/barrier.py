"""Lets threads wait for one another inside compiled code.

They spin briefly, since most waits are shorter than a system call, and then sleep: when other processes keep the cores
busy, a thread that keeps spinning or yielding takes the core of the thread that it waits for, or loses its own.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from shard_server.engines.torch_engine.kernels.codegen.compiled import jit
from shard_server.engines.torch_engine.kernels.codegen.cpu import is_arm64
from shard_server.engines.torch_engine.kernels.codegen.llvm import intrinsic

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_MAX_SPINS = 2000
"""The number of pauses, on x86-64 40 to 50 ns each, before a thread sleeps: waking up costs as much time."""
_FUTEX = 98 if is_arm64() else 202
"""The number of Linux's system call"""
_WAIT, _WAKE = 128, 129
"""Its operations among the threads of one process"""
_ALL = 2**31 - 1


@jit()
def wait_for_all(barrier: Any, target: Any, system_call: Any) -> None:
    """Wait until `target` calls have been made for the barrier.

    At the address `barrier` are two int64, initially 0: the number of calls, and the number of sleeping threads. Writes
    of all callers before the call are visible to all afterwards. `system_call` is the address of C's function.
    """
    sleepers = barrier + 8
    if add(barrier, 1) + 1 == target:
        if read(sleepers):
            call_system(system_call, _FUTEX, barrier, _WAKE, _ALL)
        return
    for _ in range(_MAX_SPINS):
        if read(barrier) >= target:
            return
        pause()
    while True:
        # Counted before the check: the last thread either sees a sleeper, or this thread sees the last call.
        add(sleepers, 1)
        num_calls = read(barrier)
        if num_calls < target:
            call_system(system_call, _FUTEX, barrier, _WAIT, num_calls)  # returns at once if there are more by now
        add(sleepers, -1)
        if read(barrier) >= target:
            return


@intrinsic
def add(_typing: Any, _address: Any, _number: Any) -> Any:
    """Atomically add to the int64 at `address`; returns the value before."""

    def generate(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(args[0], _I64.as_pointer()), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def read(_typing: Any, _address: Any) -> Any:
    """Atomically read the int64 at `address`."""

    def generate(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(args[0], _I64.as_pointer()), "seq_cst", 8)

    return types.int64(types.int64), generate


@intrinsic
def pause(_typing: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, _signature: Any, _args: Any) -> Any:
        # The instruction that arm64 has for this, `yield`, does nothing on most of its CPUs: `isb` takes a while.
        name, arguments = ("llvm.aarch64.isb", [ir.Constant(_I32, 15)]) if is_arm64() else ("llvm.x86.sse2.pause", [])
        function_type = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
        builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), arguments)
        return context.get_dummy_value()

    return types.void(), generate


# C functions are called by address and not by name, so that the code can be cached.


@intrinsic
def called(_typing: Any, _function: Any) -> Any:
    """Call the C function at the address `function`, which takes no arguments and returns an int."""

    def generate(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        function_type = ir.FunctionType(ir.IntType(32), [])
        return builder.call(builder.inttoptr(args[0], function_type.as_pointer()), [])

    return types.int32(types.int64), generate


@intrinsic
def call_system(_typing: Any, _function: Any, _number: Any, _first: Any, _second: Any, _third: Any) -> Any:
    """Call `syscall` at the address `function`, with three arguments and 0 as the fourth."""

    def generate(context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        function_type = ir.FunctionType(_I64, [_I64], var_arg=True)
        function, *arguments = args
        builder.call(builder.inttoptr(function, function_type.as_pointer()), [*arguments, ir.Constant(_I64, 0)])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate
