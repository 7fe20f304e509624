"""The client side of the data plane: requests multiplexed over one stream per router, which survive a router's loss.

request.py             `LinkRequest`, a request on its way to a router, and the progress of its choices
link.py                `RouterLink`, the interface, and `GrpcRouterLink`, one connection that reconnects
open_choices.py        the choices in flight over one link, by slot; `Sink`, which receives their progress
fast_path.py           forwards the text of most choices without a call to their sinks
deferred_token_log.py  the tokens of the fast path, recorded many frames at a time
group.py               `RouterGroup`: several routers as one link, with failover
members.py             the routers of a group, and what they can serve together
tracked_request.py     a request of a group: what was delivered, and the request for the next router
identity.py            a link's identity over its connections, and the losses to report to its router
cancel_notifier.py     notifies routers of requests that were abandoned
"""
