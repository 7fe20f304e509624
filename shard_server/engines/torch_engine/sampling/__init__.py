"""Draws tokens from logits.

sampler.py            masks, penalties, temperature, top_k and top_p, row by row
batched_draws.py      the random numbers, and drawing many rows at once on an accelerator
guides.py             the interface of guided decoding
llguidance_guides.py  guides as bitmasks over the vocabulary, with llguidance
speculation.py        drafts by prompt lookup
"""
