"""The interface of the command: flags, their environment variables, their documentation and precedence."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import click
import pytest

from kvloom_common.config import KvloomConfig, ModelConfig
from lab.commands import main as lab_command
from lab.free_ports import pick_free_ports
from tests.conftest import REPOSITORY
from tests.fakes.plugin_site import PluginSite
from tools.cli.commands import main
from tools.cli.launch import apply_flags
from tools.cli.lazy_group import LazyGroup
from tools.failures import CommandError
from tools.models.resolve import resolve_model
from tools.options import load_config_file
from tools.supervisor.flag_model import flag_model
from tools.supervisor.process_specs import plan_stages
from tools.supervisor.shared_port import SharedPort


def leaf_commands(command: click.Command, path: str) -> list[tuple[str, click.Command]]:
    if not isinstance(command, click.Group):
        return [(path, command)]
    context = click.Context(command)
    found = [(name, command.get_command(context, name)) for name in command.list_commands(context)]
    return [leaf for name, child in found if child for leaf in leaf_commands(child, f"{path} {name}")]


LEAF_COMMANDS = leaf_commands(main, "kvloom") + leaf_commands(lab_command, "kvloom-lab")


@pytest.mark.parametrize(("path", "command"), LEAF_COMMANDS)
def test_flags_are_kebab_case_and_explained(path: str, command: click.Command):
    """All flags have one style, and --help explains them."""
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert re.fullmatch(r"--[a-z]+(-[a-z]+)*", parameter.opts[0])
    assert command.help


def test_flags_override_the_file(tmp_path: Path):
    """A flag overrides the file, and settings without a flag keep the value in the file."""
    path = tmp_path / "kvloom.toml"
    path.write_text("[edge]\nport = 1000\n[shard]\nnum_shards = 5\nengine = 'sim'\n")
    config = load_config_file(path)
    apply_flags(
        config,
        shards={"": 3},
        engine=None,
        sim_step_ms=None,
        sim_prefill_tokens_per_second=None,
        http_port=0,
        router_port=None,
        metrics_port=None,
        secret_file=None,
        api_keys=Path("keys"),
        tls_certificate=None,
        tls_key=None,
        tls_client_ca=None,
        insecure=True,
        host="0.0.0.0",
        name_prefix="west-",
        redis_url=None,
        no_deterministic=True,
        edges=2,
        routers=None,
        colocate=True,
        role=("edge", "shard", "edge"),
        advertise="gpu1",
        control=True,
    )
    assert (config.fabric.roles, config.fabric.advertised_host) == (["edge", "shard"], "gpu1")
    assert (config.edge.num_edges, config.edge.colocate, config.router.num_routers) == (2, True, 1)
    assert (config.edge.host, config.router.host, config.callers.allow_insecure) == ("0.0.0.0", "0.0.0.0", True)
    assert config.callers.api_keys_file == str(Path.cwd() / "keys")  # a daemon reads it from another directory
    assert (config.shard.num_shards, config.shard.engine, config.edge.port) == (3, "sim", 0)
    assert not config.shard.torch.deterministic
    assert config.router.port == KvloomConfig().router.port


def test_paths_in_a_file_are_relative_to_it(tmp_path: Path):
    """A configuration next to its policy file must work from any working directory."""
    path = tmp_path / "kvloom.toml"
    path.write_text(
        "[safety]\npolicy_file = 'policy.toml'\n"
        "[control]\nwebhook_secret_file = 'secret'\n"
        "[model]\npath = '/models/x'\n[router.decision_log]\npath = 'a.jsonl'\n"
    )
    config = load_config_file(path)
    assert config.control.webhook_secret_file == str(tmp_path / "secret")
    assert config.safety.policy_file == str(tmp_path / "policy.toml")
    assert config.router.decision_log.path == str(tmp_path / "a.jsonl")
    assert config.model.path == "/models/x"


def test_a_models_path_may_be_a_known_name(tmp_path: Path):
    """A second model with the built-in files, in another type, needs no path on this machine."""
    (tmp_path / "mine").mkdir()
    path = tmp_path / "kvloom.toml"
    path.write_text("[[models]]\nname = 'a'\npath = 'mine'\n[[models]]\nname = 'b'\npath = 'smollm2-135m-instruct'\n")
    assert [model.path for model in load_config_file(path).models] == [str(tmp_path / "mine"), "smollm2-135m-instruct"]


def test_a_bad_file_is_named_with_its_key(tmp_path: Path):
    """The user must see which key of which file is wrong."""
    path = tmp_path / "kvloom.toml"
    path.write_text("[edge]\nprot = 1\n")
    with pytest.raises(CommandError, match=r"kvloom\.toml is not valid: .*prot"):
        load_config_file(path)


def test_an_engine_that_does_not_exist_is_refused_before_anything_starts(
    tmp_path: Path, plugin_site: PluginSite, capsys: pytest.CaptureFixture[str]
):
    """A misspelt name, in the file or as a flag, must not show as shards that die again and again."""
    plugin_site.install_example("kvloom.engines")
    path = tmp_path / "kvloom.toml"
    path.write_text("[shard]\nengine = 'ecco'\n")
    for arguments in (["--config", str(path)], ["--engine", "ecco"]):
        with pytest.raises(SystemExit) as exit_info:
            main.main(["up", "--data-dir", str(tmp_path / "data"), *arguments], prog_name="kvloom")
        assert exit_info.value.code
        assert re.search(r"'ecco'.* echo, sim, tensorrt_llm, torch", capsys.readouterr().err)


@pytest.mark.parametrize(("args", "heading"), [([], "Run a fabric:"), (["bench"], "Commands:")])
def test_without_a_command_the_help_is_shown(args: list[str], heading: str, capsys: pytest.CaptureFixture[str]):
    """The command without arguments is what users try first, and is not an error."""
    with pytest.raises(SystemExit) as exit_info:
        main.main(args, prog_name="kvloom")
    assert exit_info.value.code == 2
    shown = capsys.readouterr().err
    assert shown.startswith("Usage: kvloom")
    assert heading in shown
    assert "error" not in shown.splitlines()[-1]


@pytest.mark.parametrize("former", ["dst", "chaos", "bench index", "bench data-plane"])
def test_a_command_that_went_to_the_laboratory_says_so(former: str, capsys: pytest.CaptureFixture[str]):
    """Scripts and habits have the former names, and "no such command" would not help."""
    with pytest.raises(SystemExit) as exit_info:
        main.main([*former.split(), "--seeds", "3"], prog_name="kvloom")
    assert exit_info.value.code == 1
    shown = capsys.readouterr().err
    assert shown.startswith(f"error: kvloom {former} is now kvloom-lab {former}, which a checkout")
    assert shown.endswith("(docs/reference/lab.md)\n")
    assert f"kvloom-lab {former}" in {" ".join(path.split()[:3]) for path, _ in LEAF_COMMANDS}


def test_a_missing_package_is_named_with_the_extra_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """`pip install kvloom` brings the SDK alone: a user who then runs a command is told what is missing, in one line. A
    module of ours that is missing is a bug, and shows as one."""
    (tmp_path / "command_of_a_test.py").write_text("import torch.no_such_module\n")
    (tmp_path / "damaged_command_of_a_test.py").write_text("import tools.no_such_module\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "strange_command_of_a_test.py").write_text("import no_such_package\n")
    modules = {
        "run": "command_of_a_test:run",
        "fail": "damaged_command_of_a_test:run",
        "peer": "strange_command_of_a_test:run",
    }
    group = LazyGroup("group", commands_at=modules)
    with pytest.raises(SystemExit) as exit_info:
        group.main(["run"])
    assert exit_info.value.code == 1
    expected = 'error: torch is not installed; it comes with pip install "kvloom-fabric[torch]"\n'
    assert capsys.readouterr().err == expected
    with pytest.raises(SystemExit):
        group.main(["peer"])
    assert capsys.readouterr().err == "error: no_such_package is not installed\n"
    with pytest.raises(ModuleNotFoundError, match="tools"):
        group.main(["fail"])
    others = LazyGroup("group", commands_at={"run": "command_of_a_test:run", "up": "tools.cli.up:up"})
    with pytest.raises(SystemExit) as exit_info:
        others.main(["--help"])
    assert exit_info.value.code == 0
    shown = capsys.readouterr().out
    assert "  run\n" in shown  # a list imports nothing, and so cannot know
    assert "up   Start the fabric" in shown


def test_a_model_directory_is_served_under_its_own_name(tmp_path: Path):
    """Clients type this name: it must be predictable."""
    model = tmp_path / "My-Llama"
    model.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (model / name).write_text("{}")
    assert resolve_model(str(model), tmp_path / "cache", lambda _: None)[:2] == ("my-llama", model)


@pytest.mark.parametrize(
    "content", [pytest.param(b"", marks=pytest.mark.long), b"GGUF\x03\x00\x00\x00 and then nothing"]
)
def test_a_damaged_gguf_file_is_refused_with_its_name(tmp_path: Path, content: bytes):
    """An interrupted download is the most common bad model file."""
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(CommandError, match=r"could not be prepared: .*broken\.gguf"):
        resolve_model(str(path), tmp_path / "cache", lambda _: None)


def test_a_path_given_to_up_survives_the_change_of_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A detached fabric runs in another directory than the command that started it."""
    (tmp_path / "model.gguf").touch()
    monkeypatch.chdir(tmp_path)
    path = str(tmp_path / "model.gguf")
    assert (flag_model("model.gguf").name, flag_model("model.gguf").path) == ("", path)
    assert (flag_model("mine=model.gguf").name, flag_model("mine=model.gguf").path) == ("mine", path)
    assert flag_model("smollm2-135m-instruct").path == "smollm2-135m-instruct"


def test_a_port_in_use_is_noticed_and_a_fresh_one_is_free():
    """Otherwise two fabrics could share one port by mistake."""
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(OSError):
        SharedPort("127.0.0.1", server.getsockname()[1])
    ports = pick_free_ports(4)
    assert len(set(ports)) == 4
    for port in ports:
        SharedPort("127.0.0.1", port).close()


def test_a_claimed_port_is_open_to_children_and_to_no_other_fabric():
    """With SO_REUSEPORT alone a second fabric could join silently and get half of the traffic."""
    claimed = SharedPort("127.0.0.1", 0)
    try:
        with pytest.raises(OSError):
            SharedPort("127.0.0.1", claimed.port)
        with claimed.listener(), claimed.listener(), pytest.raises(OSError):
            SharedPort("127.0.0.1", claimed.port)
        with pytest.raises(OSError):
            socket.create_server(("127.0.0.1", claimed.port))
    finally:
        claimed.close()
    SharedPort("127.0.0.1", claimed.port).close()


def test_only_one_socket_of_a_port_listens_for_a_process_that_is_not_there_yet():
    """It would take its share of the clients, and they would wait, though others could serve them at once; while there
    are no others, waiting is better than being refused."""
    claimed = SharedPort("127.0.0.1", 0)

    def listens(one: socket.socket) -> bool:
        return bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))

    try:
        with claimed.listener() as first, claimed.listener() as second:
            assert (listens(first), listens(second)) == (True, False)
            assert claimed.is_served()
            assert not claimed.is_served(besides=first)
            first.close()
            assert not claimed.is_served()
            with claimed.listener() as third:
                assert listens(third)
                second.listen()
                assert claimed.is_served(besides=third)
    finally:
        claimed.close()


def test_connections_in_the_queue_of_a_socket_outlive_its_process():
    """A restart relies on this: the supervisor keeps the socket, and the successor accepts the waiting connections."""
    claimed = SharedPort("127.0.0.1", 0)
    try:
        with claimed.listener() as listener:
            of_the_process = listener.dup()
            with socket.create_connection(("127.0.0.1", claimed.port), timeout=5.0) as client:
                of_the_process.close()
                client.sendall(b"hello")
                served, _ = listener.accept()
                with served:
                    assert served.recv(5) == b"hello"
    finally:
        claimed.close()


def test_redis_starts_first_and_only_when_no_other_is_named(tmp_path: Path):
    """Shards register in Redis, so that it must be up. An external Redis is not started."""
    config = KvloomConfig()
    config.redis.url = f"unix://:password@{tmp_path}/redis.sock?db=0"
    config.shard.num_shards = 3
    path = tmp_path / "config.json"
    stages = plan_stages(config, path, embed_redis=True, start_timeout_seconds=1)
    assert [[spec.role for spec in stage] for stage in stages] == [
        ["redis"],
        ["safety", "router", "shard", "shard", "shard", "edge"],
    ]
    names = [spec.name for stage in stages for spec in stage]
    assert len(set(names)) == len(names)
    external = plan_stages(config, path, embed_redis=False, start_timeout_seconds=1)
    assert [spec.role for stage in external for spec in stage].count("redis") == 0


@pytest.mark.parametrize(
    ("num_edges", "num_routers", "colocate", "expected"),
    [
        (1, 1, False, ["safety", "router", "shard-0", "edge"]),
        (2, 2, False, ["safety", "router-0", "router-1", "shard-0", "edge-0", "edge-1"]),
        (2, 1, True, ["safety", "shard-0", "edge-0", "edge-1"]),
    ],
)
def test_several_edges_and_routers_are_numbered_and_colocated_routers_are_no_processes(
    tmp_path: Path, num_edges: int, num_routers: int, colocate: bool, expected: list[str]
):
    """Logs and commands use these names. A single process is named after its role."""
    config = KvloomConfig()
    config.shard.num_shards = 1
    config.edge.num_edges, config.edge.colocate, config.router.num_routers = num_edges, colocate, num_routers
    (stage,) = plan_stages(config, tmp_path / "config.json", embed_redis=False, start_timeout_seconds=1)
    assert [spec.name for spec in stage] == expected


def test_shards_have_ports_of_their_own_where_one_is_given(tmp_path: Path):
    """Routers on other machines know the ports in advance, so that no two shards may have the same."""
    config = KvloomConfig()
    config.models = [ModelConfig(name=name, path=f"/{name}", shard={"num_shards": 2}) for name in ("a", "b")]
    config.shard.port = 9400
    (stage,) = plan_stages(config, tmp_path / "config.json", embed_redis=False, start_timeout_seconds=1)
    shards = [spec.argv for spec in stage if spec.role == "shard"]
    assert [argv[argv.index("--port") + 1] for argv in shards] == ["9400", "9401", "9402", "9403"]


def test_the_readme_names_every_command_by_group():
    """The README is where a newcomer looks for what there is; `kvloom --help` is the one list that it repeats."""
    readme = (REPOSITORY / "README.md").read_text()
    assert isinstance(main, LazyGroup)
    for heading, commands in main.sections.items():
        assert f"| {heading} | {' '.join(f'`{name}`' for name in commands)} |" in readme
