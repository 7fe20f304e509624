"""Threads that wait for one another inside compiled code.

They spin, since most waits are shorter than a system call; one that has spun for long lets others have its core, so
that threads that share one with other processes do not wait for somebody whose place they take.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from shard_server.engines.torch_engine.amx import intrinsic
from shard_server.engines.torch_engine.compiled import jit

_I64 = ir.IntType(64)
_PATIENCE = 1000
"""Pauses, of 40 to 50 ns each, before a core is offered to others."""


@jit(inline=True)
def wait_for_all(counter: Any, target: Any, yield_address: Any) -> None:
    """Until `target` calls have been made for the int64 at the address `counter`. All that the callers wrote before is
    seen by all afterwards. `yield_address`: of sched_yield."""
    add_one(counter)
    num_pauses = 0
    while read(counter) < target:
        pause()
        num_pauses += 1
        if num_pauses > _PATIENCE:
            called(yield_address)


@intrinsic
def add_one(_typing: Any, _address: Any) -> Any:
    """To the int64 at `address`, at once for all threads."""

    def generate(context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        place = builder.inttoptr(args[0], _I64.as_pointer())
        builder.atomic_rmw("add", place, ir.Constant(_I64, 1), "seq_cst")
        return context.get_dummy_value()

    return types.void(types.int64), generate


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


@intrinsic
def called(_typing: Any, _address: Any) -> Any:
    """What the C function at `address` returns: an int, of no arguments. An address and no name, so that the code can
    be kept."""

    def generate(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        function_type = ir.FunctionType(ir.IntType(32), [])
        return builder.call(builder.inttoptr(args[0], function_type.as_pointer()), [])

    return types.int32(types.int64), generate
