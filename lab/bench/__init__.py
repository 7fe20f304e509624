"""Benches: what engines, routing and the data plane cost or reach, each printed as a table or JSON.

commands.py                 `kvloom-lab bench`: the commands by name
data_plane/                 CPU per token and request of the fabric, process by process, also beside other gateways
epp.py                      `kvloom-lab bench epp`: the endpoint picker on llm-d's sizing workload
encoder_peers/              ONNX Runtime, for `kvloom-lab bench encoder-peers`
engine_peers/               other engines for `kvloom-lab bench engine-peers`
injections/                 `kvloom-lab bench injections`: an attempt at a classifier of prompt injections
peers/                      other gateways for `kvloom-lab bench data-plane --peers`
autoscaling.py              `kvloom-lab bench autoscaling`: a day on fleets whose size several laws decide
autoscaling_laws.py         those laws
context_windows.py          `kvloom-lab bench context-window`: cache hits of conversations beyond the window
conversations_command.py    `kvloom-lab bench conversations`: cache hits of each placement policy on a live fabric
conversations.py            plays conversations over HTTP
infinite_cache.py           the hits that a perfect cache would have
kv_shares.py                `kvloom-lab bench kv-shares`: cache hits of a tenant that another one floods
fairness.py                 `kvloom-lab bench fairness`
fairness_model.py           what a tenant that floods the fleet costs another one, in virtual time
fairness_run.py             the same on a fabric of real processes
brownout.py                 `kvloom-lab bench brownout`
brownout_model.py           a time of overload with the brownout ladder and without, in virtual time
brownout_run.py             the same on fabrics of real processes
overload.py                 `kvloom-lab bench overload`: goodput under overload, in virtual time
phrases.py                  `kvloom-lab bench phrases`: deny lists of many phrases
preemption.py               `kvloom-lab bench preemption`: urgent requests on shards that batch answers fill
experiment.py               what all benches share: flags, a run, rows, and their table, JSON and plot
modelled.py                 experiments in virtual time: requests at random times, a fleet's capacity
bench_fabric.py             the fabric that a bench starts: its options, its configuration, and what the bench asks it
arrivals.py                 requests at random times, and how many of them a fabric can answer
plots.py                    plots of cache hits by turn, and of goodput over time
disturbed.py               what the router says of streams, and whether two runs have the same answers
spot_notice.py              `kvloom-lab bench spot-notice`: a shard with notice under load, and what its streams noticed
tenant_timing.py            `kvloom-lab bench tenant-timing`: what the time to the first token tells another tenant
auc.py                      how well two samples can be told apart, with its confidence interval
prefix_index.py             `kvloom-lab bench index`: the router's prefix index
prefix_index_fill.py        fills an index as a fleet does
vector_search.py            `kvloom-lab bench vector-search`: the index of a vector store
"""
