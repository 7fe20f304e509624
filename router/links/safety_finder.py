"""The safety services that a router may use: the configured one, and those that announce themselves in the registry."""

from __future__ import annotations

from kvloom_common.access.exposure import is_loopback
from kvloom_common.addresses import join_address
from kvloom_common.config import KvloomConfig
from kvloom_common.discovery.announcer import fabric_host
from kvloom_common.discovery.process_finder import ProcessFinder
from kvloom_common.trust.seal import PLAIN, Sealer


def safety_finder(config: KvloomConfig, router_id: str, sealer: Sealer = PLAIN) -> ProcessFinder:
    """Finds the service of this machine first, and then those of others."""
    # The service of this machine listens where its fabric does; a configured one may be on another machine.
    host = fabric_host(config, config.safety.host) if is_loopback(config.safety.host) else config.safety.host
    configured = join_address(host, config.safety.port) if config.safety.port else ""
    return ProcessFinder(config.redis if config.safety.discover else None, "safety", router_id, configured, sealer)
