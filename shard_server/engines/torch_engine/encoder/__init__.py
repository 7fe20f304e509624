"""Encoders: models of BERT's architecture, which generate no text and only give embeddings.

config.py      config.json, checked
weights.py     the tensors, by the names of any of the families
model.py       the forward pass over the tokens of many texts
runner.py      the model with the arithmetic that it computes with
step_loop.py   one iteration: take waiting texts, embed, report
"""
