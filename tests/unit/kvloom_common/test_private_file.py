"""Files that only this user can read, and what may take the place of what: a regular file that of a regular file.

The table of writers has every place of the repository that replaces a file or keeps one open: what it finds at its
path, a device, a link, a pipe or a folder, stays as it is.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import os
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from sqlalchemy.engine import make_url

from kvloom.v1.control_service_pb2 import FollowResponse
from kvloom_common.access.api_keys import write_api_keys
from kvloom_common.access.tenant_file import TenantFile
from kvloom_common.config import KvloomConfig, dump_config
from kvloom_common.database.database import open_database, with_driver
from kvloom_common.delivery_log import MAX_BYTES, DeliveryLog, WitnessLine
from kvloom_common.private_file import (
    make_own_folder,
    make_private_folder,
    move_file,
    move_folder,
    open_private_file,
    replacement,
    write_private_file,
)
from kvloom_common.receipts import keys as receipt_keys
from kvloom_common.trust.secret import FabricSecret, write_secret
from router.decisions.file import RotatingFile
from router.metering.recent import FILE as RECENT_FILE
from router.metering.recent import RecentRecords
from router.metering.spool import Spool
from setup.steps import Steps
from shard_server.engines.torch_engine.checkpoint.converted_model import locked
from tests.conftest import REPOSITORY
from tools.cli import metrics
from tools.models.registry import ModelRegistry
from tools.supervisor.embedded_redis import embedded_redis
from tools.supervisor.logs.bounded_log import BoundedLog
from tools.supervisor.models.history import ModelHistory
from tools.supervisor.state import FabricState, RunFolder

PLACES: Final = ("link to a device", "link to a file", "dangling link", "pipe", "folder", "socket")
HELPER: Final = REPOSITORY / "kvloom_common" / "private_file.py"


@contextlib.contextmanager
def foreign(path: Path, what: str) -> Iterator[None]:
    """Something that is not a regular file at `path`. Checks that it stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    others = path.parent / "others"
    with contextlib.ExitStack() as stack:
        if what == "folder":
            path.mkdir()
        elif what == "pipe":
            os.mkfifo(path)
        elif what == "socket":
            stack.enter_context(socket.socket(socket.AF_UNIX)).bind(str(path))
        else:
            if what == "link to a file":
                others.write_bytes(b"another's\n")
                others.chmod(0o644)
            path.symlink_to(os.devnull if what == "link to a device" else others)
        before = path.lstat()
        yield
        after = path.lstat()
        assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
        assert stat.S_ISCHR(Path(os.devnull).stat().st_mode)
        if what == "link to a file":
            assert (others.read_bytes(), stat.S_IMODE(others.stat().st_mode)) == (b"another's\n", 0o644)
        else:
            assert not others.exists()
        assert not [left for left in path.parent.iterdir() if left.name.startswith(".")]


def write_tenants(path: Path) -> None:
    file = TenantFile(path)
    file.begin_snapshot()
    file.add_to_snapshot(FollowResponse(table_id="table", begins_snapshot=True, is_complete=True))
    file.complete_snapshot()
    file.close()


def write_witness(path: Path) -> None:
    witness = DeliveryLog(path)
    witness.note(WitnessLine("request", 1))
    witness.flush()


def write_rotated_witness(path: Path) -> None:
    current = path.with_name(path.name.removesuffix(".1"))
    os.close(open_private_file(current, os.O_WRONLY | os.O_CREAT))
    os.truncate(current, MAX_BYTES + 1)
    write_witness(current)


def rotate_decisions(path: Path) -> None:
    file = RotatingFile(path.with_name(path.name.removesuffix(".1")), 20)
    try:
        file.append([(b"", b"x" * 9 + b"\n") for _ in range(4)])
    finally:
        file.close()


def rotate_log(path: Path) -> None:
    current = path.with_name(path.name.removesuffix(".1"))
    current.write_bytes(b"of an earlier run\n")
    current.chmod(0o600)
    BoundedLog(current).close()


def write_progress(path: Path) -> None:
    Spool(path.parent).write_progress(1, [b"{}"])


def write_segment(path: Path) -> None:
    spool = Spool(path.parent)
    try:
        spool.open()
        spool.append([(1, b"{}")])
    finally:
        spool.close()


def open_spool(path: Path) -> None:
    Spool(path.parent).open()


def open_recent(path: Path) -> None:
    RecentRecords().open(path.parent)


def write_state(path: Path) -> None:
    RunFolder(path.parent.parent).write(
        FabricState(supervisor_pid=1, supervisor_started=0.0, http_url="", router_address="", model="")
    )


def lock_data_dir(path: Path) -> None:
    with RunFolder(path.parent.parent).locked():
        pass


def register_model(path: Path) -> None:
    model = path.parent / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (model / name).write_bytes(b"{}")
    ModelRegistry(path).add("model", model)


def open_control(path: Path) -> None:
    async def run() -> None:
        name = str(path).removesuffix(".lock")
        async with open_database(with_driver(make_url(f"sqlite:///{name}"))):
            pass

    asyncio.run(run())


def read_receipt_key(path: Path) -> None:
    receipt_keys.made_or_read(path.with_name("receipts.key"))


def lock_conversion(path: Path) -> None:
    with locked(path):
        pass


WRITERS: Final[dict[str, tuple[str, Callable[[Path], Any]]]] = {
    "a private file": ("file", lambda path: write_private_file(path, b"content")),
    "the secret": ("secret", lambda path: write_secret(path, FabricSecret.draw())),
    "the configuration of processes": ("run/config.json", lambda path: dump_config(KvloomConfig(), path)),
    "the file of keys": ("api_keys", lambda path: write_api_keys(path, [])),
    "the key of receipts": ("receipts.key", read_receipt_key),
    "the published keys of receipts": ("receipts.key.pub", read_receipt_key),
    "the lock of the key of receipts": ("receipts.key.lock", read_receipt_key),
    "a copy of the table of tenants": ("tenants/edge-0.table", write_tenants),
    "the witness of usage": ("witness/edge-0.jsonl", write_witness),
    "the witness's rotation": ("witness/edge-0.jsonl.1", write_rotated_witness),
    "the decision log": ("decisions.jsonl", rotate_decisions),
    "the decision log's rotation": ("decisions.jsonl.1", rotate_decisions),
    "a log": ("logs/edge-0.log", lambda path: BoundedLog(path).close()),
    "a log's rotation": ("logs/edge-0.log.1", rotate_log),
    "the spool's progress": ("usage/r/i/progress", write_progress),
    "the spool's segment": (f"usage/r/i/{1:016d}.seg", write_segment),
    "the spool's lock": ("usage/r/i/lock", open_spool),
    "the latest records": (f"usage/r/i/{RECENT_FILE}", open_recent),
    "the state of a fabric": ("run/state.json", write_state),
    "the lock of a data directory": ("run/lock", lock_data_dir),
    "the history of models": ("model-history.jsonl", lambda path: ModelHistory(path.parent).add("load", "m", "done")),
    "the registry of models": ("models.json", register_model),
    "the targets of Prometheus": ("targets.json", lambda path: metrics._write(b"[]", path)),
    "the configuration of Redis": ("run/redis.conf", lambda path: embedded_redis("unix://:p@/s?db=0", path.parent)),
    "the database": ("control.db", open_control),
    "the database's lock": ("control.db.lock", open_control),
    "the lock of a conversion": ("models/m.lock", lock_conversion),
    "the steps of a set-up": ("steps.json", lambda path: Steps(path).forget()),
}
SILENT: Final = {"a copy of the table of tenants", "the witness of usage", "the witness's rotation"}
"""Those that log what they can't write; and the history of models reports it."""
READ_FIRST: Final = {
    "the key of receipts", "the published keys of receipts", "the history of models", "the registry of models",
    "the targets of Prometheus", "the steps of a set-up",
}  # fmt: skip


@pytest.mark.parametrize("what", PLACES)
@pytest.mark.parametrize("writer", WRITERS)
def test_only_a_regular_file_is_replaced_or_written(tmp_path: Path, writer: str, what: str):
    """As root, a rename would turn /dev/null into a regular file, and a link would lead anywhere."""
    name, write = WRITERS[writer]
    path = tmp_path / name
    if what == "pipe" and writer in READ_FIRST:
        pytest.skip("reading a pipe waits for its writer")
    with foreign(path, what):
        error: BaseException | None = None
        try:
            write(path)
        except BaseException as raised:
            error = raised
        if writer not in SILENT and writer != "the history of models":
            said = f"{error} {error and error.__cause__}"
            assert error is not None
            assert writer in READ_FIRST or "not a regular file" in said or "directory" in said.lower(), said


@pytest.mark.parametrize("writer", WRITERS)
def test_what_is_written_is_for_this_user_alone(tmp_path: Path, writer: str):
    """Whatever the umask is, and also where an earlier version left other rights."""
    name, write = WRITERS[writer]
    path = tmp_path / "data" / name
    previous = os.umask(0)
    try:
        make_private_folder(path.parent)
        if writer in ("the database", "the spool's lock", "the decision log", "the witness of usage", "a log"):
            path.touch(0o666)
        write(path)
    finally:
        os.umask(previous)
    expected = 0o644 if writer == "the targets of Prometheus" else 0o600
    assert stat.S_IMODE(path.lstat().st_mode) == expected
    for folder in (path.parent, *path.parent.parents):
        if folder == tmp_path:
            break
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_device_is_not_replaced(tmp_path: Path):
    """Without a link between: the path itself is the device's."""
    path = tmp_path / "null"
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("only root makes devices")
    regular = tmp_path / "regular"
    regular.touch()
    for write in (
        lambda: write_private_file(path, b"content"),
        lambda: move_file(regular, path),
        lambda: move_file(path, regular),
        lambda: open_private_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        lambda: rotate_decisions(path),
        lambda: BoundedLog(path),
    ):
        with pytest.raises(OSError, match="not a regular file"):
            write()
    assert stat.S_ISCHR(path.lstat().st_mode)
    assert regular.is_file()


def test_a_replacement_that_fails_leaves_nothing(tmp_path: Path):
    """The earlier file stays, and no temporary one is left."""
    path = tmp_path / "file"
    path.write_bytes(b"earlier")
    with pytest.raises(ZeroDivisionError), replacement(path) as file:
        file.write(b"%d" % (1 // 0))
    assert [(found.name, found.read_bytes()) for found in tmp_path.iterdir()] == [("file", b"earlier")]


def test_folders_of_others_keep_their_mode(tmp_path: Path):
    """A secret's file may be in /tmp, or in a home."""
    tmp_path.chmod(0o1777)
    write_secret(tmp_path / "secret", FabricSecret.draw())
    make_private_folder(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o1777
    own = tmp_path / "own"
    own.mkdir(mode=0o755)
    make_own_folder(own)
    assert stat.S_IMODE(own.stat().st_mode) == 0o700


def test_a_folder_takes_no_others_place(tmp_path: Path):
    """Not even that of an empty one, which a rename would replace."""
    for name in ("new", "old"):
        (tmp_path / name).mkdir()
    with pytest.raises(FileExistsError):
        move_folder(tmp_path / "new", tmp_path / "old")
    (tmp_path / "link").symlink_to(tmp_path / "absent")
    with pytest.raises(FileExistsError):
        move_folder(tmp_path / "new", tmp_path / "link")
    move_folder(tmp_path / "new", tmp_path / "absent")


NOT_RENAMES: Final = {
    "msgspec.structs": "makes a copy",
    "self._supervisor": "replaces a process",
    "process": "likewise",
}


def renames(source: str) -> Iterator[str]:
    """The calls in a module by which one file may take another one's place."""
    if not any(f"{name}(" in source for name in ("replace", "rename", "renames", "link", "hardlink_to", "move")):
        return  # parsing takes milliseconds
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        receiver, name = ast.unparse(node.func.value), node.func.attr
        is_module = (receiver, name) in {
            ("os", "replace"), ("os", "rename"), ("os", "renames"), ("os", "link"), ("shutil", "move"),
        }  # fmt: skip
        is_path = (name == "replace" and len(node.args) == 1 and not node.keywords) or name in ("rename", "hardlink_to")
        if is_module or (is_path and receiver not in NOT_RENAMES):
            yield ast.unparse(node)


def test_files_are_renamed_in_one_place_only():
    """Anything else could replace what is no file. Tests, and the build scripts of a release, are not meant."""
    packages = ("control", "edge_http", "kvloom", "kvloom_common", "router", "safety_svc", "shard_server")
    files = [file for name in (*packages, "tools", "setup", "fabric") for file in (REPOSITORY / name).rglob("*.py")]
    assert len(files) > 500
    found = {f"{file.relative_to(REPOSITORY)}: {call}" for file in files for call in renames(file.read_text("utf-8"))}
    assert found == {
        f"{HELPER.relative_to(REPOSITORY)}: {call}"
        for call in ("source.replace(target)", "source.rename(target)", "os.link(own, path, follow_symlinks=False)")
    }


@pytest.mark.parametrize(
    "source",
    ["os.replace(a, b)", "os.rename(a, b)", "Path(a).replace(b)", "self._path.rename(b)", "shutil.move(a, b)"],
)
def test_the_guard_sees_a_rename(source: str):
    """A guard that sees nothing would pass."""
    assert list(renames(source)) == [source]


PLAIN_WRITES: Final = {
    "kvloom_common/models/model_card.py": "a temporary folder of its own",
    "shard_server/engines/torch_engine/checkpoint/converted_model.py": "a temporary folder beside the model's",
    "shard_server/engines/torch_engine/checkpoint/gguf_conversion.py": "likewise",
    "shard_server/engines/torch_engine/checkpoint/gguf_weights.py": "likewise",
}
"""Modules of services that write files by themselves, and where."""


def writes(source: str) -> Iterator[str]:
    """The calls in a module that make a file, or open one for writing."""
    if not any(name in source for name in ("open(", "write_text", "write_bytes", "NamedTemporaryFile")):
        return  # parsing takes milliseconds
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        given = (*node.args, *(key.value for key in node.keywords))
        texts = [one.value for one in given if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        has_mode = any(len(text) <= 3 and set(text) & set("wax+") for text in texts)
        is_open = name == "open" and (has_mode or "O_CREAT" in ast.unparse(node))
        if is_open or name in ("write_text", "write_bytes", "NamedTemporaryFile"):
            yield ast.unparse(node)


def test_services_write_files_by_the_helper_only() -> None:
    """Anything else would follow a link, empty a device, or leave a file that other users may read."""
    packages = ("control", "edge_http", "kvloom", "kvloom_common", "router", "safety_svc", "shard_server")
    files = [file for name in (*packages, "tools/supervisor") for file in (REPOSITORY / name).rglob("*.py")]
    assert len(files) > 300
    found = {str(file.relative_to(REPOSITORY)): [*writes(file.read_text("utf-8"))] for file in files if file != HELPER}
    assert {name for name, calls in found.items() if calls} == set(PLAIN_WRITES)


@pytest.mark.parametrize("source", ["path.open('ab')", "open(path, 'w')", "path.write_text('')",
                                    "os.open(path, os.O_WRONLY | os.O_CREAT)", "path.open(mode='r+b')"])  # fmt: skip
def test_the_guard_sees_a_write(source: str) -> None:
    assert list(writes(source))
