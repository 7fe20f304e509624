"""uv reads none of pip's settings, which people have made for a reason: a mirror, a proxy, a company's certificates."""

from __future__ import annotations

import pytest

from setup.pip_settings import UntranslatableError, for_uv, parse_settings


def test_the_environment_is_stronger_than_a_file_and_a_command_s_section_than_the_global_one() -> None:
    """The same setting may be made in three places; pip says in its documentation which one counts."""
    listed = "\n".join(
        (
            ":env:.default-timeout='180'",
            "download.index-url='https://not-for-install.example'",
            "global.index-url='https://global.example'",
            "global.timeout='5'",
            "install.timeout='20'",
            "install.index-url='https://install.example'",
        )
    )
    assert parse_settings(listed) == {"index-url": "https://install.example", "timeout": "180"}


def test_each_setting_that_matters_has_its_counterpart() -> None:
    """Lists are separated in three different ways, and uv's variables are not named like pip's settings."""
    settings = {
        "index-url": "https://mirror.example/simple",
        "extra-index-url": "https://a.example/simple\nhttps://b.example/simple",
        "find-links": "/wheels  /more-wheels",
        "trusted-host": "a.example b.example",
        "cert": "/etc/company.pem",
        "client-cert": "/etc/own.pem",
        "proxy": "http://proxy.example:3128",
        "timeout": "59.5",
        "retries": "7",
        "constraint": "/etc/constraints.txt",
        "no-binary": "one,two",
        "only-binary": ":all:",
        "no-index": "true",
        "pre": "yes",
        "no-cache-dir": "off",
        "quiet": "3",
        "use-feature": "truststore",
        "require-hashes": "0",
    }
    translated = for_uv(settings)
    assert translated.environment == {
        "UV_DEFAULT_INDEX": "https://mirror.example/simple",
        "UV_INDEX": "https://a.example/simple https://b.example/simple",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_FIND_LINKS": "/wheels,/more-wheels",
        "UV_INSECURE_HOST": "a.example b.example",
        "SSL_CERT_FILE": "/etc/company.pem",
        "SSL_CLIENT_CERT": "/etc/own.pem",
        "HTTP_PROXY": "http://proxy.example:3128",
        "HTTPS_PROXY": "http://proxy.example:3128",
        "ALL_PROXY": "http://proxy.example:3128",
        "UV_HTTP_TIMEOUT": "60",
        "UV_HTTP_RETRIES": "7",
        "UV_SYSTEM_CERTS": "1",
    }
    assert translated.flags == (
        "--constraint=/etc/constraints.txt",
        "--no-binary=one",
        "--no-binary=two",
        "--only-binary=:all:",
        "--no-index",
        "--prerelease=allow",
    )


@pytest.mark.parametrize("name", ["require-hashes", "keyring-provider", "target", "a-setting-of-tomorrow"])
def test_a_setting_without_a_counterpart_is_named_and_its_value_is_not(name: str) -> None:
    """What uv would not respect must not be dropped silently, and may contain a password."""
    with pytest.raises(UntranslatableError, match=name) as raised:
        for_uv({name: "s3cret"})
    assert "s3cret" not in str(raised.value)
