"""Threads that wait for one another inside compiled code.

They spin for a little, since most waits are shorter than a system call, and sleep then: where other processes keep the
cores busy, somebody who spins, or yields again and again, takes the place of the one he waits for, or loses his own.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from shard_server.engines.torch_engine.kernels.amx import intrinsic
from shard_server.engines.torch_engine.kernels.compiled import jit

_I64 = ir.IntType(64)
_PATIENCE = 2000
"""Pauses, of 40 to 50 ns each: to be woken costs as much."""
_FUTEX, _WAIT, _WAKE = 202, 128, 129
"""Linux on x86-64: the system call, and its operations among the threads of one process."""
_ALL = 2**31 - 1


@jit()
def wait_for_all(barrier: Any, target: Any, system_call: Any) -> None:
    """Until `target` calls have been made for the two int64 at the address `barrier`: calls, and how many sleep; zeros
    at first. All that the callers wrote before is seen by all afterwards. `system_call`: address of C's function."""
    sleepers = barrier + 8
    if add(barrier, 1) + 1 == target:
        if read(sleepers):
            call_system(system_call, _FUTEX, barrier, _WAKE, _ALL)
        return
    for _ in range(_PATIENCE):
        if read(barrier) >= target:
            return
        pause()
    while True:
        # Counted before it looks again: the last one either sees that somebody sleeps, or has been seen.
        add(sleepers, 1)
        num_calls = read(barrier)
        if num_calls < target:
            call_system(system_call, _FUTEX, barrier, _WAIT, num_calls)  # returns at once if there are more by now
        add(sleepers, -1)
        if read(barrier) >= target:
            return


@intrinsic
def add(_typing: Any, _address: Any, _number: Any) -> Any:
    """To the int64 at `address`, at once for all threads; what was there before."""

    def generate(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(args[0], _I64.as_pointer()), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def read(_typing: Any, _address: Any) -> Any:
    """The int64 at `address` as the other threads have left it."""

    def generate(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(args[0], _I64.as_pointer()), "seq_cst", 8)

    return types.int64(types.int64), generate


@intrinsic
def pause(_typing: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, _signature: Any, _args: Any) -> Any:
        function_type = ir.FunctionType(ir.VoidType(), [])
        builder.call(cgutils.get_or_insert_function(builder.module, function_type, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), generate


# Functions of C by address, not by name, so that the code can be kept.


@intrinsic
def called(_typing: Any, _function: Any) -> Any:
    """What the function at the address `function` returns: an int, of no arguments."""

    def generate(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        function_type = ir.FunctionType(ir.IntType(32), [])
        return builder.call(builder.inttoptr(args[0], function_type.as_pointer()), [])

    return types.int32(types.int64), generate


@intrinsic
def call_system(_typing: Any, _function: Any, _number: Any, _first: Any, _second: Any, _third: Any) -> Any:
    """`syscall` at the address `function`, with three arguments; a fourth is 0."""

    def generate(context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        function_type = ir.FunctionType(_I64, [_I64], var_arg=True)
        function, *arguments = args
        builder.call(builder.inttoptr(function, function_type.as_pointer()), [*arguments, ir.Constant(_I64, 0)])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate
