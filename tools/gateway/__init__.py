"""`kvloom epp`: an endpoint picker of the Gateway API. It places the requests of an Envoy on engines of others.

pool.py              the file that describes a pool of engines
inference_pool.py    the pool of an InferencePool and its InferenceObjectives in Kubernetes
kubernetes_api.py    follows collections of objects of a Kubernetes API server
picker.py            places requests on endpoints with the router core, and follows them to their ends. Pure
predicted_blocks.py  which blocks an engine without KV events is taken to have. Pure
prompts.py           the prompt of a body, in tokens or in pieces of four bytes
engine_load.py       the load of an engine, from its Prometheus metrics. Pure
scraper.py           reads the metrics of all endpoints again and again
kv_events.py         the KV events of vLLM and SGLang, in the hashes of the prefix index. Pure
kv_subscriber.py     receives them over ZeroMQ, and has gaps replayed
exchange.py          one HTTP request and its answer, as Envoy's external processing shows them
picker_service.py    the gRPC service with its health, and what keeps endpoints up to date
metrics.py           the metrics of this process
command.py           the command
"""
