"""The building blocks of compiled code.

cpu.py              what the CPU can do
llvm.py             pieces of LLVM code that several intrinsics are made of
compiled.py         the compiler's settings and array helpers
tasks.py            programs: lists of tasks for all threads
barrier.py          how the threads wait for one another
vector_ops.py       operations on sixteen numbers as LLVM code
vector_blocks.py    products in vector registers as LLVM code
group_blocks.py     products with grouped weights as LLVM code
amx.py              matrix tile instructions as LLVM code
"""
