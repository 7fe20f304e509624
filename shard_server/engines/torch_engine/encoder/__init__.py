"""Encoders: models of BERT's architecture, which generate no text and only give embeddings.

config.py             config.json, checked
model.py              the weights, and the forward pass over the tokens of many texts with torch's operators
compiled_forward.py   the same as one program of compiled code
runner.py             the model with the arithmetic that it computes with
step_loop.py          one iteration: take waiting texts, embed, report
"""
