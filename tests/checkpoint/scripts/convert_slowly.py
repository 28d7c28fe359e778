"""Convert a checkpoint and say so after each file that is written: python convert_slowly.py SOURCE DESTINATION."""

from __future__ import annotations

import sys

from shardtree.checkpoint.conversion import convert
from shardtree.storage import LocalStorage
from shardtree.testing import Call, watched


def after(call: Call) -> None:
    if call.method == "replace" and call.name.endswith(".done"):
        print("done", flush=True)  # noqa: T201 - the parent reads it
        sys.stdin.readline()  # until it says so, or kills this process


source, destination = sys.argv[1:]
convert(source, watched(LocalStorage(destination), after=after), backend="safetensors", max_bytes_in_flight=8192)
