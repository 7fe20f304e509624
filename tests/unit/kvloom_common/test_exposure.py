"""Listeners that other machines can reach need TLS and API keys, or the operator's word."""

from __future__ import annotations

import pytest

from kvloom_common.access.exposure import exposure_risk
from kvloom_common.config import CallersConfig, ControlConfig, KvloomConfig, TlsConfig

TLS = TlsConfig(certificate_file="c", key_file="k")
KEYS = CallersConfig(api_keys_file="f")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.1", "kvloom.example"])
def test_what_is_missing_is_named(host: str) -> None:
    """An operator who opens a port must learn what that risks, before it is open."""
    bare = exposure_risk(KvloomConfig(), host)
    assert all(flag in bare for flag in ("--tls-certificate", "--api-keys", "--insecure"))
    assert "--tls-certificate" not in exposure_risk(KvloomConfig(tls=TLS), host)
    assert "--api-keys" not in exposure_risk(KvloomConfig(callers=KEYS), host)
    assert not exposure_risk(KvloomConfig(tls=TLS, callers=KEYS), host)
    assert not exposure_risk(KvloomConfig(callers=CallersConfig(allow_insecure=True)), host)


def test_tenants_protect_the_api_and_not_the_metrics() -> None:
    """Keys of tenants are no keys for the metrics of all of them, so these need keys of their own."""
    config = KvloomConfig(tls=TLS, control=ControlConfig(enabled=True))
    assert not exposure_risk(config, "0.0.0.0")
    assert "reads the metrics" in exposure_risk(config, "0.0.0.0", is_for_scrapers=True)
    config.callers = KEYS
    assert not exposure_risk(config, "0.0.0.0", is_for_scrapers=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost", "::1", "[::1]"])
def test_loopback_needs_nothing(host: str) -> None:
    """`make run` must work as it is."""
    assert not exposure_risk(KvloomConfig(), host)
