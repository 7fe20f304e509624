"""The features that are off by default, one folder each. The way of a request names none of it.

configured.py       the features as they are configured, and what a router does with all of them
shadow/             compares answers with those of candidates
result_cache/       answers to deterministic requests, kept for repeats
judges.py           asks models for judgements on texts, in the name of the safety service
receipts/           signed receipts, with which answers can be computed again
answer_proofs.py    what answers follow from in which the safety policy has found something
result_recorder.py  whole answers for the two before: looked up for arriving requests, kept at their end
tracing.py          spans of requests, for an OpenTelemetry collector
fingerprints.py     what the shards of a model have in common, on which answers depend
"""
