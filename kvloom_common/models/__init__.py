"""The models of a fabric, as every process knows them.

configured.py        the models in the configuration, and what holds for the shards of each
model_card.py        what a process must know of a model to take its requests, as one transferable file
card_service.py      ModelCardService: gives and fetches cards
served_model.py      a model whose requests this process can take
catalogue.py         those models by name, which come and go while the process runs
model_routes.py      which model takes a request: by route, rules, shares, fallbacks and rollouts
succession.py        a model that is being unloaded leaves its names to its successor
rollout_follower.py  keeps routes in step with the rollouts in the registry
cascade.py           when the answer of a smaller model is discarded, so that a larger one answers
languages.py         the language of a text
likelihood_gap.py    how much less likely a candidate finds the answers of a model, with confidence intervals
"""
