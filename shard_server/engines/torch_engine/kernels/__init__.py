"""Compiled CPU kernels: bf16 and int8 products and attention on matrix tiles (AMX), without the interpreter between
them.

compiled_forward.py   a forward pass as one program
tasks.py              programs: lists of tasks for all threads
program.py            the entry point of compiled code, which runs a program
thread_pool.py        runs programs on torch's threads
barrier.py            how the threads wait for one another
tile_linear.py        linear layers on matrix tiles
tile_tasks.py         the tasks of products and attention
tile_matmul.py        bf16 products
tile_matmul_int8.py   int8 products
tile_attention.py     attention on matrix tiles, as Python sees it
tile_kernels.py       its compiled kernels
attention_scratch.py  the memory that an attention task works in
row_kernels.py        norms, rotation and look-ups, row by row
simd_ops.py           vector operations as LLVM code
amx.py                matrix tile instructions as LLVM code
compiled.py           the compiler's settings and array helpers
int8_linear.py        quantised layers with torch's operators
reference_decoder.py  a plain decoder, to compare with
"""
