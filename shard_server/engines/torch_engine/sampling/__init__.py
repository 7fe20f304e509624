"""Draws tokens from logits.

sampler.py            masks, adjustments, temperature, min_p, top_k and top_p, row by row
adjustments.py        what a request changes in the logits: bias, penalties, min_tokens
batched_draws.py      the random numbers, and drawing many rows at once on an accelerator
device_draws.py       draws a step's tokens on an accelerator, without waiting for them
guides.py             the interface of guided decoding
llguidance_guides.py  guides as bitmasks over the vocabulary, with llguidance
guide_schema.py       the schema that the compiler gets: simplified, bounded, what it cannot follow named
speculation.py        drafts by prompt lookup
prediction.py         drafts from the answer that the client expects
"""
