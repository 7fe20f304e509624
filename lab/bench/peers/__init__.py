"""Other gateways for `kvloom-lab bench data-plane --peers`: one file per gateway.

peer.py                 what a gateway needs to be installed and started
install.py              installs it once, into a folder of its own
mock_worker.py          the engine behind HTTP gateways
dynamo.py               NVIDIA Dynamo
dynamo_broker.py        the broker between its processes
litellm.py              LiteLLM's proxy
nginx.py                nginx, which inspects nothing
sglang_router.py        sglang-router
smg.py                  smg, over HTTP and over gRPC
smg_grpc_servicer.py    the engine behind smg's gRPC mode
vllm_router.py          vllm-router
"""
