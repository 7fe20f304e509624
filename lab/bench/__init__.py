"""Benches: what engines, routing and the data plane cost or reach, each printed as a table or JSON.

commands.py                 `kvloom-lab bench`: the commands by name
data_plane/                 CPU per token and request of the fabric, process by process, also beside other gateways
epp.py                      `kvloom-lab bench epp`: the endpoint picker on llm-d's sizing workload
encoder_peers/              ONNX Runtime, for `kvloom-lab bench encoder-peers`
engine_peers/               other engines for `kvloom-lab bench engine-peers`
peers/                      other gateways for `kvloom-lab bench data-plane --peers`
autoscaling.py              `kvloom-lab bench autoscaling`: a day on fleets whose size several laws decide
autoscaling_laws.py         those laws
injections/                 `kvloom-lab bench injections`: trains the classifier of prompt injections, and attacks it
regions.py                  `kvloom-lab bench regions`: a day in several cells, and the loss of one
region_model.py             those cells, in one virtual time
phrases.py                  `kvloom-lab bench phrases`: deny lists of many phrases
experiment.py               what all benches share: a run, rows, and their table and JSON
modelled.py                 experiments in virtual time: requests at random times, a fleet's capacity
prefix_index.py             `kvloom-lab bench index`: the router's prefix index
prefix_index_fill.py        fills an index as a fleet does
search_quality.py           `kvloom-lab bench search-quality`: how often a vector store finds the right document
vector_search.py            `kvloom-lab bench vector-search`: the index of a vector store
weight_quality.py           `kvloom-lab bench weight-quality`: what each format of weights changes in the answers
"""
