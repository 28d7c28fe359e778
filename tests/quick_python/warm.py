"""The process that commands of `quick_python` are forked from: warm.py ADDRESS. It ends when its input does."""

from __future__ import annotations

import gc
import json
import os
import runpy
import select
import signal
import socket
import sys
import types
import warnings
from typing import Any, NamedTuple


class Command(NamedTuple):
    """What a command is given."""

    arguments: list[str]
    folder: str
    environment: dict[str, str]
    streams: list[int]


def received(connection: socket.socket) -> Command:
    _, streams, _, _ = socket.recv_fds(connection, 1, 3)
    with connection.makefile() as text:
        return Command(**json.loads(text.readline()), streams=streams)


def asked_of(listener: socket.socket) -> Command | None:
    """Answer each command by a fork; return it there, and None in this process once its input has ended."""
    watching: list[int] = []
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        watching = [each for each in watching if not os.waitpid(each, os.WNOHANG)[0]]
        if sys.stdin in ready:
            return None
        connection, _ = listener.accept()
        watching.append(os.fork())
        if not watching[-1]:
            listener.close()
            return forked(connection)
        connection.close()


def forked(connection: socket.socket) -> Command:
    """Return the command in a fork of its own, of which this process reports the end; it ends it if the client dies."""
    command = received(connection)
    process = os.fork()
    if not process:
        connection.close()
        return command
    for stream in (0, 1, *command.streams):
        os.close(stream)  # whoever reads them waits until all have closed them
    ended = os.pidfd_open(process)
    while ended not in select.select([ended, connection], [], [])[0]:
        # Signals that it passes on; nothing more comes once it is dead.
        os.kill(process, next(iter(connection.recv(1)), signal.SIGKILL))
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    try:
        connection.sendall(b"%d\n" % status)
    finally:
        os._exit(0)


def become(command: Command) -> list[str]:
    """Make this process that of a command, and return its arguments but for Python's own."""
    for own, given in enumerate(command.streams):
        os.dup2(given, own)
        os.close(given)
    os.chdir(command.folder)
    os.environ.clear()
    os.environ.update(command.environment)
    # What they know of their files is of this process's own.
    encoding = os.environ.get("PYTHONIOENCODING")
    sys.stdin = os.fdopen(0, encoding=encoding, closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding=encoding, closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, encoding=encoding, errors="backslashreplace", closefd=False)
    arguments, options = command.arguments, os.environ.get("PYTHONWARNINGS", "").split(",")
    while arguments[0] == "-W":
        options.append(arguments[1])
        arguments = arguments[2:]
    sys.warnoptions[:] = filter(None, options)
    warnings._processoptions(sys.warnoptions)  # type: ignore[attr-defined]  # as the interpreter does
    return arguments


def run(what: str, *arguments: str) -> None:
    """Run code, a module or a script as the main module."""
    first: Any = ""
    if what == "-c":
        code, *sys.argv[1:] = arguments
        sys.argv[0] = "-c"
    elif what == "-m":
        name, *sys.argv[1:] = arguments
    else:
        sys.argv[:] = [what, *arguments]
        first = os.path.dirname(os.path.abspath(what))
    sys.path[0] = first
    if what == "-m":
        sys.path[0] = os.getcwd()
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    elif what == "-c":
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), vars(main))
    else:
        runpy.run_path(what, run_name="__main__")


def warm(address: str) -> socket.socket:
    """Do what else takes time only once; return the socket that commands come by."""
    import torch

    torch.ones(2).sum()
    gc.freeze()  # what is here needs no look when a fork ends
    assert len(os.listdir("/proc/self/task")) == 1, "a fork has one thread: others would be missed"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    os.write(1, b"warm\n")
    return listener


if __name__ == "__main__" and (asked := asked_of(warm(sys.argv[1]))) is not None:
    run(*become(asked))
