"""What a command of `quick_python` starts: client.py ADDRESS ARGUMENTS. It passes on all it has, ends as the fork.

SIGTERM is passed on too: what the command does then, the fork does.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys


def main(address: str, *arguments: str) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        socket.send_fds(connection, [b"\n"], [0, 1, 2])
        request = {"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}
        connection.sendall(json.dumps(request).encode() + b"\n")
        signal.signal(signal.SIGTERM, lambda number, _: connection.sendall(bytes([number])))
        with connection.makefile() as answer:
            status = int(answer.readline() or -signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if status < 0:
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main(*sys.argv[1:])
