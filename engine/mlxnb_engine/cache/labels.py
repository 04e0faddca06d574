"""What people call a namespace: a line of text beside the records, only to be shown. Identity never depends on it.

    root/names/<namespace hex>.txt
"""

from __future__ import annotations

import re

from .files import FileOps, write_all
from .home import attempt

LABEL = re.compile(r"([0-9a-f]{64})\.txt")
MOST_BYTES = 1000


def write(files: FileOps, root: str, temporary: str, namespace: bytes, text: str) -> None:
    """Note this name unless it is noted. temporary: a free path on the same drive. Raises OSError."""
    path, data = f"{root}/names/{namespace.hex()}.txt", text.encode("utf-8", "replace")[:MOST_BYTES]
    try:
        if bytes(files.read(path, MOST_BYTES)[1]) == data:
            return
    except FileNotFoundError:
        pass
    try:
        files.make_dir(f"{root}/names")
    except FileExistsError:
        pass
    fd = files.create_excl(temporary)
    try:
        try:
            write_all(files, fd, data)
        finally:
            files.close(fd)
        files.rename(temporary, path)
    except OSError:
        files.unlink(temporary)
        raise


def forget(files: FileOps, root: str, namespace: bytes | None) -> None:
    """Delete the name of this namespace, or all, as far as it goes."""
    try:
        names = [entry.name for entry in files.list(f"{root}/names") if entry.kind == "file" and LABEL.fullmatch(entry.name)]
    except OSError:
        return
    for name in names:
        if namespace is None or name == f"{namespace.hex()}.txt":
            attempt(files.unlink, f"{root}/names/{name}")


def read(files: FileOps, root: str) -> dict[str, str]:
    """namespace hex -> name. What is not legible is left out."""
    found: dict[str, str] = {}
    try:
        entries = files.list(f"{root}/names")
    except OSError:
        return found
    for entry in entries:
        match = LABEL.fullmatch(entry.name)
        if entry.kind == "file" and match:
            try:
                found[match[1]] = files.read(f"{root}/names/{entry.name}", MOST_BYTES)[1].decode("utf-8", "ignore")
            except OSError:
                continue
    return found
