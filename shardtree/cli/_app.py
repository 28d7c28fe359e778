"""The commands and their options; each command imports its code when it runs, so that `--help` is fast."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from ._command import FORMATS, Command, CommandGroup, Json
from ._series_app import series

app = typer.Typer(
    cls=CommandGroup,
    help="Sharded state dicts as immutable trees, saved in one layout and loaded in any other.",
    add_completion=False,
    rich_markup_mode=None,  # rich's tables cut the names of options in narrow terminals.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="shardtree COMMAND --help has each command's options, an example and its exit statuses: 0, 1 if the"
    " answer is no, 2 if something cannot be done, 130 after Ctrl-C.\n\nPatterns of keys: * is one part between dots,"
    " ** any number of parts, and any other character is itself.",
)
app.add_typer(series, name="series")
_command = partial(app.command, cls=Command)


def _warn_of_pickle(value: bool) -> bool:
    if not value:
        return value
    from ..live import launched_rank

    if not launched_rank():
        what = "loading pickled values can run any code that the checkpoint's writer put there"
        typer.echo(f"warning: --allow-pickle: {what}", err=True)
    return value


_AllowPickle = Annotated[
    bool,
    typer.Option(
        "--allow-pickle",
        callback=_warn_of_pickle,
        help="Load pickled values too. That can run any code that the checkpoint's writer put there: use it only for"
        " checkpoints that you trust as you trust a program.",
    ),
]
_Keys = Annotated[
    list[str] | None,
    typer.Option("--key", metavar="PATTERN", help="Only keys that match, such as '**.bias'. Repeatable."),
]


def _print_version(value: bool) -> None:
    if value:
        # The root isn't imported by `from ..`, since no module may import it: it imports all others.
        root = __name__.partition(".")[0]
        typer.echo(f"{root} {sys.modules[root].__version__}")
        raise typer.Exit


@app.callback()
def _shardtree(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    del version


@_command(
    epilog="Example: shardtree demo --ranks 8 --load-ranks 3 --keep step-100\n\n"
    "Exit status: 0; 1 if something differs; 2 if a save or load fails."
)
def demo(
    ranks: Annotated[int, typer.Option(min=1, max=64, metavar="N", help="Processes that save.")] = 4,
    load_ranks: Annotated[int, typer.Option(min=1, max=64, metavar="N", help="Processes that load.")] = 2,
    keep: Annotated[
        Path | None, typer.Option(help="Save to this folder, and leave the checkpoint there.", metavar="DIR")
    ] = None,
) -> int:
    """Save a training state from several processes, load it in another layout, and compare every bit."""
    from ._demo import run_demo

    return run_demo(ranks=ranks, load_ranks=load_ranks, keep=keep)


@_command(
    epilog="Example: shardtree inspect step-100 --sort bytes --limit 20\n\n"
    "Exit status: 0; 1 if files are missing, or the common state cannot be read; 2 if there is no checkpoint to read."
)
def inspect(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CKPT", help="A checkpoint's folder, file or URL; or the folder of a run's steps.")
    ],
    key: _Keys = None,
    tree: Annotated[bool, typer.Option("--tree", help="Keys as a tree; layers that are alike are one row.")] = False,
    common: Annotated[bool, typer.Option("--common", help="The whole common state, with nested values.")] = False,
    values: Annotated[
        str | None, typer.Option(metavar="KEY[INDEX]", help="Elements of a tensor, as 'w[0:4]'. No others are read.")
    ] = None,
    layout: Annotated[str | None, typer.Option(metavar="KEY", help="The file of each piece of a tensor.")] = None,
    sort: Annotated[
        Literal["key", "bytes"], typer.Option(help="Order of the rows; by bytes, the largest comes first.")
    ] = "key",
    limit: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Rows of each table.", show_default="all")
    ] = None,
    as_json: Json = False,
    allow_pickle: _AllowPickle = False,
) -> int:
    """Show a checkpoint's contents and each tensor's cut into pieces, or a run's steps. Only --values reads tensors."""
    from ._inspect import Selection, run_inspect

    if sum((tree, common, values is not None, layout is not None)) > 1:
        raise typer.BadParameter("give one of --tree, --common, --values and --layout")
    view = Selection(tuple(key or ()), sort, limit, tree=tree, common=common, values=values, layout=layout)
    return run_inspect(checkpoint, view, as_json=as_json, allow_pickle=allow_pickle)


@_command(
    epilog="Example: shardtree picture step-100 decoder.layers.0.mlp.linear_fc1.weight -o fc1.svg\n\n"
    "Exit status: 0; 2 if there is no such checkpoint or tensor, or the file cannot be written."
)
def picture(
    checkpoint: Annotated[str, typer.Argument(metavar="CKPT", help="A checkpoint's folder, file or URL.")],
    key: Annotated[str | None, typer.Argument(metavar="KEY", help="A tensor's key; else the largest ones.")] = None,
    out: Annotated[
        str | None,
        typer.Option("--out", "-o", metavar="FILE", help="File to write: .svg, .html or .txt; else it is printed."),
    ] = None,
    allow_pickle: _AllowPickle = False,
) -> int:
    """Draw which file holds which part of a tensor, without reading a tensor."""
    from ._views import run_picture

    return run_picture(checkpoint, key, out, allow_pickle=allow_pickle)


@_command(
    epilog="Example: shardtree verify step-100\n\n"
    "Exit status: 0 no damage found; 1 damaged; 2 no checkpoint, a format without checks, or bytes without a checksum"
    " if these are required."
)
def verify(
    checkpoint: Annotated[str, typer.Argument(metavar="CKPT", help="A checkpoint's folder, file or URL.")],
    threads: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Threads that check.", show_default="torch's, up to 4")
    ] = None,
    replicas: Annotated[
        bool, typer.Option("--replicas", help="Only show tensors whose copies in different files differ.")
    ] = False,
    require_checksums: Annotated[
        bool,
        typer.Option(
            "--require-checksums", help="Exit with 2 if nothing is damaged, but not all bytes can be checked."
        ),
    ] = False,
    as_json: Json = False,
) -> int:
    """Read every byte of a checkpoint, and show each damaged region of a file, and the bytes without a checksum."""
    from ._verify import run_replicas, run_verify

    if replicas and require_checksums:
        raise typer.BadParameter("--replicas compares copies, and checks no checksums")
    if replicas:
        return run_replicas(checkpoint, as_json=as_json)
    return run_verify(checkpoint, threads=threads, needs_checksums=require_checksums, as_json=as_json)


@_command(
    epilog="Example: shardtree diff step-100 step-100-resaved --key 'model.**'\n\n"
    "Exit status, as diff's: 0 equal; 1 different; 2 trouble."
)
def diff(
    left: Annotated[str, typer.Argument(metavar="A", help="A checkpoint's folder, file or URL.")],
    right: Annotated[str, typer.Argument(metavar="B", help="Another checkpoint, of any format and layout.")],
    only_structure: Annotated[
        bool, typer.Option("--structure-only", help="Compare keys, dtypes and shapes, and read no value.")
    ] = False,
    key: _Keys = None,
    as_json: Json = False,
    allow_pickle: _AllowPickle = False,
) -> int:
    """Compare two checkpoints, bit for bit, across formats and layouts."""
    from ._diff import run_diff

    run = partial(run_diff, patterns=key or [], only_structure=only_structure)
    return run(left, right, as_json=as_json, allow_pickle=allow_pickle)


@_command(
    epilog="Example: shardtree report step-100 -o report.html; shardtree report step-100 step-200 -o changes.html\n\n"
    "Exit status: 0; 1 if there is damage or a difference; 2 trouble, for example if values cannot be compared."
)
def report(
    checkpoint: Annotated[str, typer.Argument(metavar="CKPT", help="A checkpoint's folder, file or URL.")],
    other: Annotated[
        str | None, typer.Argument(metavar="B", help="Another checkpoint: the report shows the differences.")
    ] = None,
    out: Annotated[str, typer.Option("--out", "-o", metavar="FILE.html", help="The file to write.")] = "report.html",
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Do not look for damage or compare values: no tensor is read.")
    ] = False,
    allow_pickle: _AllowPickle = False,
) -> int:
    """Write an HTML page about a checkpoint (tensors, layouts, sizes, damage), or about the differences of two."""
    from ._report import run_report

    if not out.lower().endswith((".html", ".htm")):
        raise typer.BadParameter(f"a report is HTML: {out!r} should end in .html")
    return run_report(checkpoint, other, out, is_checked=not no_verify, allow_pickle=allow_pickle)


@_command(
    epilog="Example: shardtree convert step-100 hf --to hf --cast bf16 --leave-out 'optimizer.**'\n\n"
    "By N processes: torchrun --nproc-per-node N -m shardtree convert ...\n\n"
    "Exit status: 0 converted; 2 trouble. Run the same command again to resume one that was stopped."
)
def convert(
    source: Annotated[str, typer.Argument(metavar="A", help="A checkpoint's folder, file or URL.")],
    destination: Annotated[
        str, typer.Argument(metavar="B", help="The folder or URL to write to; or a .safetensors file.")
    ],
    backend: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="BACKEND[:VERSION]",
            help=f"Format to write: {FORMATS}, or one of an installed package. hf means huggingface.",
        ),
    ],
    common_backend: Annotated[
        str | None,
        typer.Option("--common-to", metavar="BACKEND[:VERSION]", help="Format of the common state, if different."),
    ] = None,
    transform: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE.py:NAME",
            help="Function of the tree of shards that returns the tree to write. The whole file is executed."
            " Repeatable; applied before --rename and --cast.",
        ),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:NAME",
            help="Loading function from dict of tensors to dict of tensors, or its trace; runs before --transform.",
        ),
    ] = None,
    transform_common: Annotated[
        str | None,
        typer.Option(metavar="FILE.py:NAME", help="Function of the common state that returns its new content."),
    ] = None,
    rename: Annotated[
        list[str] | None,
        typer.Option(metavar="OLD=NEW", help="New keys; each * in NEW is what the * in OLD matched. Repeatable."),
    ] = None,
    cast: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="New dtype of floating-point tensors, such as bf16.")
    ] = None,
    leave_out: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Keys to leave out; 'common' is the common state. Repeatable."),
    ] = None,
    plain: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Keys of FP8 tensors that may be cast without scales. Repeatable."),
    ] = None,
    prune: Annotated[
        bool, typer.Option("--prune", help="Allow transforms to drop tensors without --leave-out.")
    ] = False,
    optimizer: Annotated[
        Literal["model-space"] | None,
        typer.Option(help="Write Megatron-Core's dp_reshardable as fully_reshardable, which it loads in any layout."),
    ] = None,
    expert_parallel: Annotated[
        bool | None,
        typer.Option(
            "--expert-parallel/--no-expert-parallel",
            help="Whether the run that continues with --optimizer has expert parallelism, and so an optimizer for the"
            " experts. By default as in the checkpoint.",
        ),
    ] = None,
    shapes: Annotated[
        Literal["stored"] | None,
        typer.Option(metavar="stored", help="If no shapes are stored, trust those that the stored pieces add up to."),
    ] = None,
    max_bytes_in_flight: Annotated[
        str, typer.Option(metavar="SIZE", help="Upper bound of the bytes of tensors in memory.")
    ] = "256MB",
    max_file_size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Upper bound of a file's size, for the format huggingface.")
    ] = None,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Do not read back and compare the written checkpoint.")
    ] = False,
    as_json: Json = False,
    allow_pickle: _AllowPickle = False,
) -> int:
    """Convert a checkpoint of any format into another, and compare the written checkpoint with the source."""
    from ._convert import Conversion, run_convert
    from ._names import float_dtype_named, format_named, function_named, renamings, size_named
    from ._plan import through

    traces = [] if trace is None else [through(function_named(trace))]
    conversion = Conversion(
        source=source,
        destination=destination,
        backend=format_named(backend),
        common_backend=None if common_backend is None else format_named(common_backend),
        transforms=[*traces, *(function_named(text) for text in transform or [])],
        transform_common=None if transform_common is None else function_named(transform_common),
        names=renamings(rename or []),
        dtype=None if cast is None else float_dtype_named(cast),
        leave_out=leave_out or [],
        plain=plain or [],
        prune=prune,
        optimizer_in_model_space=optimizer == "model-space",
        expert_parallel=expert_parallel,
        trusts_shapes=shapes == "stored",
        most_bytes=size_named(max_bytes_in_flight),
        most_file_bytes=None if max_file_size is None else size_named(max_file_size),
        verify=not no_verify,
        allow_pickle=allow_pickle,
    )
    return run_convert(conversion, as_json=as_json)


@_command(
    epilog="Example: shardtree trace engine.py:load_weights step-100 --diff trainer.py:load_weights\n\n"
    "Exit status: 0; 1 if there are problems or differences; 2 trouble, for example if the code asks for elements."
)
def trace(
    loader: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py:NAME",
            help="Loading code: a function from tensors by name to tensors by name. The whole file is executed.",
        ),
    ],
    checkpoint: Annotated[str, typer.Argument(metavar="CKPT", help="A checkpoint's folder, file or URL.")],
    diff: Annotated[
        str | None, typer.Option(metavar="FILE.py:NAME", help="Another loader of the same model, to compare with.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Show the outputs of loading code, and elements that it leaves out or writes twice, without reading a tensor."""
    from ._names import function_named
    from ._plan import run_trace

    other = None if diff is None else function_named(diff)
    return run_trace(function_named(loader), checkpoint, other, as_json=as_json)


# These options describe layouts.

_Mesh = Annotated[str | None, typer.Option(metavar="AXIS=SIZE,...", help="Mesh of the ranks, as tp=4,dp=2.")]
_Specs = Annotated[
    list[str] | None,
    typer.Option(
        "--spec",
        metavar="PATTERN=SPEC",
        help="Layout of tensors: for each axis a mesh axis, or -, as in '**.weight=tp,-'. Repeatable; the first spec"
        " counts whose pattern matches and that has no more axes than the tensor. Others are whole on every rank.",
    ),
]
_Ranks = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Instead of a mesh: cut every tensor along its first axis over N ranks."),
]
_Cast = Annotated[bool, typer.Option("--cast", help="Convert dtypes that differ.")]
_Plain = Annotated[
    list[str] | None,
    typer.Option("--plain", metavar="PATTERN", help="Keys of FP8 tensors that may be cast without scales. Repeatable."),
]


@_command(
    epilog="Example: shardtree explain step-100 --mesh dp=2,tp=4 --spec '**.weight=tp,-'\n\n"
    "Exit status: 0 the load would succeed; 1 it would fail; 2 trouble."
)
def explain(
    checkpoint: Annotated[str, typer.Argument(metavar="CKPT", help="A checkpoint's folder, file or URL.")],
    mesh: _Mesh = None,
    spec: _Specs = None,
    ranks: _Ranks = None,
    like: Annotated[
        str | None, typer.Option(metavar="OTHER", help="Load the tensors that another checkpoint lists, in its layout.")
    ] = None,
    key: _Keys = None,
    cast: _Cast = False,
    plain: _Plain = None,
    exchange: Annotated[
        Literal["auto", "always", "never"],
        typer.Option(help="Whether one rank reads a box that several ranks want, and sends it to the others."),
    ] = "auto",
    as_json: Json = False,
    allow_pickle: _AllowPickle = False,
) -> int:
    """Show whether a load in another layout would succeed, and each rank's reads, without reading a tensor."""
    from ..shell.table import LoadOptions
    from ._layouts import mesh_layout
    from ._plan import run_explain

    layout, options = mesh_layout(mesh, spec or [], ranks), LoadOptions(allow_pickle=allow_pickle, exchange=exchange)
    run = partial(run_explain, like=like, patterns=key or [], cast=cast, plain=plain or [])
    return run(checkpoint, layout, as_json=as_json, options=options)


@_command(
    epilog="Example: shardtree plan step-100 --from-ranks 8 --mesh dp=2,tp=4 --spec '**.weight=tp,-'\n\n"
    "Exit status: 0; 2 trouble."
)
def plan(
    source: Annotated[str, typer.Argument(metavar="A", help="Checkpoint whose tensors move.")],
    target: Annotated[
        str | None, typer.Argument(metavar="B", help="Checkpoint with the wanted tensors; by default A.")
    ] = None,
    mesh: _Mesh = None,
    spec: _Specs = None,
    ranks: _Ranks = None,
    from_mesh: Annotated[
        str | None, typer.Option(metavar="AXIS=SIZE,...", help="Mesh of the ranks that have A's tensors, like --mesh.")
    ] = None,
    from_spec: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN=SPEC", help="Layout of A's tensors, like --spec.")
    ] = None,
    from_ranks: Annotated[int | None, typer.Option(min=1, metavar="N", help="Ranks that cut A, like --ranks.")] = None,
    key: _Keys = None,
    origins: Annotated[bool, typer.Option("--origins", help="Show the origin of each box of each tensor.")] = False,
    cast: _Cast = False,
    plain: _Plain = None,
    as_json: Json = False,
) -> int:
    """Show the bytes that move between ranks when tensors change their layout, without moving them.

    Without a given layout, A or B counts as laid out in its stored pieces: piece i of each tensor is on rank i.
    """
    from ._layouts import mesh_layout
    from ._plan import run_plan

    before, after = mesh_layout(from_mesh, from_spec or [], from_ranks), mesh_layout(mesh, spec or [], ranks)
    if target is None and before is None and after is None:
        raise typer.BadParameter("give another checkpoint, or a layout: --ranks, or --mesh with --spec")
    run = partial(run_plan, before=before, after=after, patterns=key or [], plain=plain or [])
    return run(source, target, origins=origins, cast=cast, as_json=as_json)
