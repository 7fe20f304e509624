"""The view that operators have of a router.

samples.py   an hour of samples of the fleet
overview.py  the fleet, the requests and the samples as messages; explanations
servicer.py  serves them to processes of the fabric
"""
