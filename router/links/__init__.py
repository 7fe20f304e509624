"""The router's connections to its peers: each link turns frames into core events and core actions into frames.

client_link.py      the router's end of one client's stream (`RouterService.Connect`)
submit_queue.py     submits and cancels of one client that the router has not processed yet
step_outbox.py      steps that wait for one client, merged into one when it takes them
link_sessions.py    the open streams by link id, so that what a broken link lost can be settled
local_link.py       a RouterLink for an edge that runs in the router's own process
fleet_links.py      which shards have a link, and which process may answer at its end
fleet_watcher.py    keeps one shard link per registered or connected shard
shard_link.py       the router's end of one shard's stream (`ShardService.Connect`)
tokenizer_claims.py  keeps shards out whose tokenizer is not that of their model
reconnect.py        what links to shards and to the safety service share: timeouts, backoff, errors
safety_link.py      the router's connection to the safety service, with hand-over to a successor
safety_stream.py    one stream to one safety service and the frames that wait for it
prefilter.py        clears answer text that the safety service need not see
prompt_filter.py    clears prompts that the safety service need not see
"""
