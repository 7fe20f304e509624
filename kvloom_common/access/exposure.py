"""The rule for listeners that other machines can reach: they need TLS and API keys, unless the operator says that
something in front of them takes care of both."""

from __future__ import annotations

import ipaddress

from kvloom_common.config import KvloomConfig


def is_loopback(host: str) -> bool:
    if host == "localhost" or host.startswith("unix:"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def authenticates(config: KvloomConfig) -> bool:
    """True when clients have to show who they are."""
    return config.control.enabled or authenticates_scrapers(config)


def authenticates_scrapers(config: KvloomConfig) -> bool:
    """True when scrapers of metrics have to show who they are; tenants' keys are not for them."""
    return bool(config.callers.api_keys_file or config.callers.provider)


def exposure_risk(config: KvloomConfig, *hosts: str, is_for_scrapers: bool = False) -> str:
    """Says what anyone who reaches one of these hosts could do; "" if nothing that the configuration does not allow.
    `is_for_scrapers`: only metrics are served there."""
    exposed = sorted({host or "every interface" for host in hosts if not is_loopback(host)})
    if not exposed or config.callers.allow_insecure:
        return ""
    risks: list[str] = []
    if not config.tls.certificate_file:
        risks.append("without TLS (--tls-certificate, --tls-key), anyone on the way reads prompts, answers and keys")
    if is_for_scrapers and not authenticates_scrapers(config):
        risks.append("without API keys (--api-keys) or an auth provider, anyone who can connect reads the metrics")
    elif not authenticates(config):
        risks.append(
            "without tenants (control.enabled), API keys (--api-keys) or an auth provider, anyone who can connect uses "
            "the models"
        )
    if not risks:
        return ""
    return (
        f"{' and '.join(exposed)} can be reached from other machines: {'; '.join(risks)}. Give what is missing, listen "
        "on 127.0.0.1 behind a proxy, or accept the risk with --insecure (callers.allow_insecure)"
    )
