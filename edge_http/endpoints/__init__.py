"""The handlers of the HTTP endpoints.

answering.py   from a validated request to the end of its answer, for all APIs
generation_job.py  a request that generates
routed.py      which model takes a request that generates
forking.py  responses that fork from a stored one behind a token
continuing.py  lets the next model of a route continue a stream whose model is lost
cascading.py   holds and judges the answer of a candidate
model_choice.py  what routes need of a request, and what its client is told of the choice
priority_class.py  the class of a request
objectives.py  its deadline, and the speed that it asks for
link_requests.py  the requests to the router that it becomes
generation.py  POST /v1/chat/completions and POST /v1/completions
embedding.py   which model takes a request that embeds
embedding_body.py  a tokenized request for embeddings, and the body of its response
embeddings.py  POST /v1/embeddings
ranking.py     POST /v1/rerank and POST /v1/score
responses.py   POST /v1/responses
preparing.py   responses without an output
file_search.py  searches vector stores for what the user asks
response_job.py  from the body of a response to its job
shortening.py  conversations that are too long for the model's window
summarizing.py  sums up what was left out of them
compacting.py  POST /v1/responses/compact, and conversations that are compacted before they are continued
background.py  background responses
input_parts.py  files and images in what requests say, with their places
file_inputs.py  files that requests give to the model, as their texts
image_inputs.py  images that requests show to the model
ownership.py   who owns stored objects
stored_input.py  the stored objects that a response has to do with
stored.py      responses that are stored: how they are kept and found
messages.py    POST /v1/messages and POST /v1/messages/count_tokens
resume.py      resumes a stream or cancels its answer
models.py      /v1/models
lora_adapters.py  POST /v1/load_lora_adapter and POST /v1/unload_lora_adapter
masking.py      hides personal data from models
moderating.py   moderation in line
moderations.py  POST /v1/moderations
guardrail.py    POST /beta/litellm_basic_guardrail_api
tokenization.py  POST /tokenize and POST /detokenize
not_served.py  refuses the APIs that kvloom does not have, by name
usage.py       GET /v1/usage
health.py      /health, /live, /ready, /metrics, /metrics/targets and /version
receipts.py    the public keys of receipts
page/          the chat page
"""
