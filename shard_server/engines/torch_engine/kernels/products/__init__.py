"""Matrix products as compiled kernels.

vectors.py         in vector registers, in float32: bf16 or int8 weights are widened
dots.py            in vector registers, by dot products of bf16 pairs and of 8-bit integers
groups.py          in vector registers, with grouped weights: in int16 within a group
amx_bf16.py        on AMX tiles, in bf16
amx_int8.py        on AMX tiles, in int8
digits.py          rows as two int8 digits a number
outputs.py         what becomes of a product's sums
columns.py         look-up of single columns: the embedding that is also the head
vector_tasks.py    the tasks of products in vector registers
amx_tasks.py       the tasks of products on AMX tiles
"""
