"""Files and folders that only this user can read, and the one way by which a file takes another one's place.

A rename replaces whatever has the target's name: as root, a log whose configured path was /dev/null would end with a
regular file there. So nothing is replaced or written here that is not a regular file, and links are not followed.

Only the standard library is imported: `python -m setup` uses this before anything is installed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
"""The rights of all users but the owner."""
_FILE_MODE: Final = 0o600
_FOLDER_MODE: Final = 0o700


def write_private_file(path: Path, content: bytes, mode: int = _FILE_MODE) -> None:
    """Replace the file atomically by one of that mode. Raises OSError, also if the path is of anything but a regular
    file."""
    with replacement(path, mode) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def replacement(path: Path, mode: int = _FILE_MODE) -> Iterator[IO[bytes]]:
    """A new file, which takes the place of the one at `path` when the context ends, and is deleted if that raises.
    Raises OSError."""
    file, name = new_file_beside(path)
    try:
        with file:
            yield file
            file.flush()
            if mode != _FILE_MODE:
                os.fchmod(file.fileno(), mode)
        move_file(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            name.unlink()
        raise


def new_file_beside(path: Path) -> tuple[IO[bytes], Path]:
    """An empty file of mode 0600 in the same folder, open for reading and writing, and its path. Raises OSError, at
    once if it could not take the place of what is at `path`."""
    _require_replaceable(path)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}")  # O_EXCL, O_NOFOLLOW and mode 0600
    return os.fdopen(descriptor, "w+b"), Path(name)


def write_once(path: Path, content: bytes) -> bool:
    """Make the file, whole at once and of mode 0600. Returns False, and leaves what there is, where another process has
    made it. Raises OSError."""
    file, own = new_file_beside(path)
    try:
        with file:
            file.write(content)
        os.link(own, path, follow_symlinks=False)
    except FileExistsError:
        return False
    finally:
        own.unlink()
    return True


def move_file(source: Path, target: Path) -> None:
    """Rename a regular file. It takes the place of a regular file at `target`, and of nothing else. Raises OSError."""
    _require_regular(source, source.lstat())
    _require_replaceable(target)
    source.replace(target)


def move_folder(source: Path, target: Path) -> None:
    """Rename a folder to a path at which there is nothing. Raises OSError."""
    if not stat.S_ISDIR(source.lstat().st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(source))
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    source.rename(target)


def open_private_file(path: Path, flags: int) -> int:
    """Open the file, made of mode 0600 if it is missing and `flags` has O_CREAT, and return its descriptor. Other users
    lose their rights to one that this user owns. Raises OSError, also if the path is of anything but a regular file;
    O_TRUNC empties the file only once that is known."""
    # O_NONBLOCK: a pipe must be refused, not waited for.
    descriptor = -1
    try:
        wanted = flags & ~os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
        descriptor = os.open(path, wanted, _FILE_MODE)
        found = os.fstat(descriptor)
        _require_regular(path, found)
        if found.st_mode & OTHERS and found.st_uid == os.geteuid():
            os.fchmod(descriptor, found.st_mode & ~OTHERS & 0o7777)
        if flags & os.O_TRUNC and found.st_size:
            os.ftruncate(descriptor, 0)
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link; a pipe without a reader, or a socket
            raise _not_regular(path) from error
        raise
    return descriptor


def make_private_folder(path: Path) -> None:
    """Make the folder, and those above it that are missing, of mode 0700. One that is there stays as it is, because it
    may be any: /tmp, or a home. Raises OSError."""
    for missing in reversed([folder for folder in (path, *path.parents) if not folder.exists()]):
        with contextlib.suppress(FileExistsError):  # another process was faster
            missing.mkdir(mode=_FOLDER_MODE)
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))


def make_own_folder(path: Path) -> None:
    """Make a folder that is kvloom's alone, as `make_private_folder` does. Other users lose their rights to it if it is
    there and belongs to this user. Raises OSError."""
    make_private_folder(path)
    make_private(path)


def make_private(path: Path) -> bool:
    """Take all rights to a file or folder that this user owns from other users. Returns True if they had any. Links and
    what belongs to others stay as they are. Raises OSError."""
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode) or not found.st_mode & OTHERS or found.st_uid != os.geteuid():
        return False
    path.chmod(stat.S_IMODE(found.st_mode) & ~OTHERS)
    return True


def _require_replaceable(path: Path) -> None:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    _require_regular(path, found)


def _require_regular(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise _not_regular(path)


def _not_regular(path: Path) -> OSError:
    return OSError(errno.EINVAL, "it is not a regular file", str(path))
