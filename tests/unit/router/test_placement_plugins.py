"""Placement policies of other packages."""

from __future__ import annotations

from typing import Any

import pytest
from structlog.testing import capture_logs

from kvloom_common.config import KvloomConfig
from kvloom_common.plugins import PluginError
from kvloom_common.process.access_log import LOG_SECONDS
from router.core.core import RouterCore
from router.core.placement import Policy
from router.core_settings import core_config
from router.placement_plugins import GuardedPolicy, guarded_policy
from tests.fakes.plugin_site import PluginSite
from tests.unit.router.core.test_placement_policies import ARRIVAL, CANDIDATE, other

GROUP = "kvloom.placement_policies"
FASTER = other(queue_seconds=0.1)


class ScriptedPolicy(Policy):
    """Returns what the test says."""

    terms = ("first", "second")

    def __init__(self, costs: object) -> None:
        self._costs = costs

    def costs(self, arrival, candidates) -> Any:
        if isinstance(self._costs, Exception):
            raise self._costs
        return self._costs

    def placed(self, arrival, shard_id):
        raise KeyError(shard_id)


@pytest.mark.parametrize(
    "costs",
    [RuntimeError("broken"), [(1.0, 2.0)], [(1.0,), (2.0,)], [(1.0, float("nan"))] * 2, None, [("a", "b")] * 2],
)
def test_a_policy_that_fails_costs_a_placement_s_quality_only(costs: object) -> None:
    """A router serves many; an error in a plugin must not end its requests."""
    policy = GuardedPolicy("acme", ScriptedPolicy(costs), lambda: 0.0)
    with capture_logs() as lines:
        found = policy.costs(ARRIVAL, [CANDIDATE, FASTER])
    assert [sum(terms) for terms in found] == [CANDIDATE.predicted_ttft_seconds, FASTER.predicted_ttft_seconds]
    assert all(len(terms) == 2 for terms in found)
    assert [(line["event"], line["policy"]) for line in lines] == [("placement_policy_failed", "acme")]


def test_a_policy_that_works_is_not_changed() -> None:
    """The guard only checks."""
    costs = [(1.0, 2.0), (0.5, 0.25)]
    policy = GuardedPolicy("acme", ScriptedPolicy(costs))
    assert policy.costs(ARRIVAL, [CANDIDATE, FASTER]) is costs


def test_the_log_of_failures_is_bounded() -> None:
    """A policy that always fails must not fill the disk at the rate of requests."""
    now = 0.0
    policy = GuardedPolicy("acme", ScriptedPolicy([]), lambda: now)
    with capture_logs() as lines:
        for _ in range(5):
            policy.placed(ARRIVAL, "a")
        now = LOG_SECONDS
        policy.placed(ARRIVAL, "a")
    assert [line["num_failures"] for line in lines] == [1, 6]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def Acme(): raise OSError('no map')", "cannot be made: .*no map"),
        ("Acme = dict", "is no router.core.placement.Policy"),
        (
            "from router.core.placement.policy import Policy\n"
            "class Acme(Policy):\n    def costs(self, arrival, candidates): return []\n",
            "does not name its `terms`",
        ),
    ],
)
def test_what_is_no_policy_is_refused_at_the_start(plugin_site: PluginSite, source: str, message: str) -> None:
    """A router that starts with it would fail at its first request."""
    plugin_site.install("acme_policy", GROUP, {"acme": "acme_policy:Acme"}, source)
    new_policy = guarded_policy("acme")
    assert new_policy is not None
    with pytest.raises(PluginError, match=message):
        new_policy()


def test_the_configuration_names_a_plugin(plugin_site: PluginSite) -> None:
    """The core gets the plugin's policy, and a mistyped name the list of all."""
    plugin_site.install_example(GROUP)
    config = KvloomConfig()
    config.router.placement.policy = "canary"
    RouterCore(core_config(config))
    config.router.placement.policy = "canari"
    with pytest.raises(PluginError, match=r"no placement policy named 'canari'\. There are: canary, conductor"):
        core_config(config)
