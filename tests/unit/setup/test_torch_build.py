"""PyTorch's default build for Linux is 3 GB of CUDA, which a machine without a GPU should not download by accident."""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Iterator

import pytest

from setup.torch_build import CPU_INDEX, choose_build, index_answers


@pytest.mark.parametrize(
    ("choice", "needs_cpu_index", "answers", "index"),
    [
        ("auto", True, True, CPU_INDEX),
        ("auto", True, False, None),  # offline, or behind a mirror: the mirror may have its own CPU build
        ("auto", False, False, None),  # a GPU, or macOS, where the default build is the right one
        ("cpu", False, False, CPU_INDEX),
        ("default", True, True, None),
        ("cpu-or-none", True, True, CPU_INDEX),
        ("cpu-or-none", True, False, None),
        ("https://mirror.example/cpu", True, False, "https://mirror.example/cpu"),
    ],
)
def test_the_build_is_the_cpu_s_unless_another_one_makes_sense(
    choice: str, needs_cpu_index: bool, answers: bool, index: str | None
) -> None:
    """What was asked for counts; without a wish, the machine decides."""
    assert choose_build(choice, needs_cpu_index=needs_cpu_index, answers=answers).index == index


def test_another_python_s_environment_does_without_torch_rather_than_with_a_large_one() -> None:
    """The quick tests with a second Python are not worth 3 GB."""
    assert not choose_build("cpu-or-none", needs_cpu_index=True, answers=False).is_wanted
    assert choose_build("cpu-or-none", needs_cpu_index=True, answers=True).is_wanted


@pytest.fixture
def index() -> Iterator[str]:
    class Answers(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(200 if self.path == "/cpu/torch/" else 404)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            """Nothing is logged."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_index_answers_if_it_has_torch(index: str) -> None:
    """A proxy's page for everything that it blocks is no index."""
    assert index_answers(f"{index}/cpu", {})
    assert not index_answers(f"{index}/other", {})


def test_an_index_behind_a_silent_firewall_is_given_up() -> None:
    """Set-up must not hang where packets are dropped."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert not index_answers(f"http://127.0.0.1:{silent.getsockname()[1]}", {}, seconds=0.05)


def test_the_proxy_of_pip_s_configuration_is_used(index: str) -> None:
    """Behind a company's proxy the direct way fails, though the index could be reached."""
    assert index_answers("http://an.index.example/cpu", {"proxy": index}) is False  # the proxy is asked for a full URL
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    assert not index_answers(f"{index}/cpu", {"proxy": f"http://127.0.0.1:{port}"})
