"""`shardtree report`: an HTML page about one checkpoint or two: contents, cuts, sizes, damage, differences."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import typer
from rich.text import Text

from ..core.geometry import group_sums
from ..errors import CheckpointingException, NotACheckpoint, StrategyError, plural, shorten
from ..inspection import OpenCheckpoint, open_checkpoint
from ..pictures import (
    Bar,
    Bars,
    Picture,
    details_html,
    draw,
    element_html,
    figure_html,
    html_page,
    stored_picture,
    table_html,
    write_text,
)
from ..shell.table import LoadOptions, VerifyReport
from ..shell.table.index import texts
from ._command import TROUBLE, options_as_typed, shell_words
from ._contents import TensorRow, cut_text, shape_text, stored_index
from ._diff import ComparedPair, difference_of, difference_tables, summary
from ._inspect import CheckpointFindings, examine, facts_of, object_table, tensor_table
from ._output import Heading, Output, Table, printable, show_verdict, size
from ._verify import find_damage, unchecked_lines, verdict
from ._views import COMMON, KEYS, common_rows, key_rows

_MOST_ROWS = 2000  # A browser is slow with a page of a million rows.
_MOST_SHARES = 64
_MOST_BARS = 16
_LONGEST_NAME = 32  # Longer names beside a bar would be cut, and look alike.

# Only the names of files tell the rank that wrote them, as in 00003-of-00008.safetensors and __3_0.distcp.
_OF_RANK = re.compile(r"(?:.*/)?(?:(\d{5,})-of-\d{5,}(?:-\d+)?|__(\d+)_\d+)\.\w+")


@dataclass(frozen=True, slots=True)
class Side:
    """A checkpoint that a report is about, with its contents and its damage.

    Attributes:
        where: Path or URL, as the user typed it.
        tree: Open checkpoint; None if it can't be opened, for example because its index is damaged.
        findings: Result of `examine`: the contents of the checkpoint; None if they can't be read.
        problem: Reason that it can't be opened or checked for damage; "" if there is none.
        verification: Result of `find_damage`: the damage, and the number of bytes checked; None if nothing was checked.
    """

    where: str
    tree: OpenCheckpoint | None
    findings: CheckpointFindings | None
    problem: str
    verification: VerifyReport | None


def run_report(checkpoint: str, other: str | None, out: str, *, is_checked: bool, allow_pickle: bool) -> int:
    """Write the report, print its verdicts, and return the exit status.

    The status is 1 for damage or a difference; else 2 if a checkpoint couldn't be opened, checked or compared; else 0.

    Args:
        checkpoint: Path or URL of the checkpoint.
        other: Path or URL of another checkpoint to compare with; None for none.
        out: Path or URL of the file to write.
        is_checked: True to check bytes for damage, and to compare values.
        allow_pickle: True to unpickle pickled values.

    Raises:
        CheckpointingException: There is no such checkpoint, or the file can't be written.
    """
    names = [checkpoint] if other is None else [checkpoint, other]
    sides = [_examine(name, is_checked=is_checked, allow_pickle=allow_pickle) for name in names]
    outcome, problem = None, ""
    if other is not None:
        outcome, problem = _compare(*sides, only_structure=not is_checked)
    write_text(out, report_page(sides, outcome, problem))
    console, verdicts = Output(), list(_verdicts(sides, outcome))
    for is_good, text in verdicts:
        show_verdict(console, is_good, text)
    problems = [text for text in (*(side.problem for side in sides), problem) if text]
    for text in problems:
        typer.echo("\n".join(map(printable, f"shardtree report: {text}".split("\n"))), err=True)
    console.print(Text(f"written: {printable(out)}"))
    if any(is_good is False for is_good, _ in verdicts):
        return 1
    return TROUBLE if problems else 0


def _examine(where: str, *, is_checked: bool, allow_pickle: bool) -> Side:
    tree, findings, problem = None, None, ""
    try:
        tree = open_checkpoint(where, options=LoadOptions(allow_pickle=allow_pickle))
        findings = examine(where, tree)
    except NotACheckpoint:
        raise
    except CheckpointingException as error:
        # Even if a damaged index can't be read, its damage is reported.
        if not is_checked:
            raise
        problem = _in_the_shell(error)
    if not is_checked:
        return Side(where, tree, findings, "", None)
    try:
        verification = find_damage(where)
    except StrategyError as error:
        fix = "The report has its contents; with --no-verify nothing is checked, and the status is 0."
        note = f"{where} was not checked for damage, since its format cannot be.\n  {_in_the_shell(error)}\n  {fix}"
        return Side(where, tree, findings, problem or note, None)
    # The damage then includes the reason that the checkpoint can't be opened.
    return Side(where, tree, findings, "" if verification.damage else problem, verification)


def _compare(left: Side, right: Side, *, only_structure: bool) -> tuple[ComparedPair | None, str]:
    if left.tree is None or right.tree is None:
        return None, "The checkpoints cannot be compared, since one of them cannot be opened."
    try:
        return difference_of([(left.where, left.tree), (right.where, right.tree)], only_structure=only_structure), ""
    except CheckpointingException as error:
        return None, f"The checkpoints cannot be compared.\n  {_in_the_shell(error)}"


def _verdicts(sides: Sequence[Side], outcome: ComparedPair | None) -> Iterator[tuple[bool | None, str]]:
    """Yield pairs (is_good, sentence) about the check of each checkpoint and the comparison; None means unknown."""
    for side in sides:
        if side.verification is None:
            yield None, f"{side.where} was not checked for damage"
        else:
            yield side.verification.sound, verdict(side.where, side.verification)
    if outcome is not None:
        yield not outcome.difference, summary(outcome)


# This section makes the page.


def report_page(sides: Sequence[Side], outcome: ComparedPair | None, problem: str = "") -> str:
    """Return the page: one file of HTML without external resources or scripts.

    Args:
        sides: One checkpoint, or the two that are compared.
        outcome: Differences between them; None if nothing was compared.
        problem: Reason that they couldn't be compared; "" if there is none.
    """
    title = " and ".join(side.where for side in sides)
    return html_page(f"Report on {title}", _parts(title, sides, outcome, problem))


def _parts(title: str, sides: Sequence[Side], outcome: ComparedPair | None, problem: str) -> Iterator[str]:
    yield element_html("h1", title)
    for is_good, text in _verdicts(sides, outcome):
        yield element_html("p", text, {None: "dim", True: "good", False: "bad"}[is_good])
    yield from _lines(problem)
    facts = [dict(facts_of(side.findings)) if side.findings is not None else {} for side in sides]
    names = dict.fromkeys(name for side_facts in facts for name in side_facts)
    rows = [(name, *(side_facts.get(name, "") for side_facts in facts)) for name in names]
    yield table_html(("", "A", "B") if len(sides) > 1 else ("", ""), rows)
    if outcome is not None:
        yield from _differences(outcome)
    for name, side in zip("AB", sides, strict=False):
        yield from _about(side, f"{name}: " if len(sides) > 1 else "")


def _lines(text: str) -> Iterator[str]:
    yield from (element_html("p", line, "bad") for line in text.split("\n") if line)


def _in_the_shell(error: CheckpointingException) -> str:
    return shell_words(str(error), options_as_typed())


def _about(side: Side, name: str) -> Iterator[str]:
    """Yield the HTML of the sections about one checkpoint; `name` precedes their headings."""
    if side.problem:
        yield element_html("h2", f"{name}problem")
        yield from _lines(side.problem)
    yield from _damage(side, name)
    if side.tree is None or side.findings is None:
        yield element_html("p", f"{name}The contents are not shown, since the checkpoint cannot be opened.", "dim")
        return
    everything = side.findings.everything
    yield element_html("h2", f"{name}sizes")
    yield from _sizes(side.tree, everything.tensors)
    if everything.tensors:
        yield element_html("h2", f"{name}tensors")
        yield from _figure(side.tree)
        yield _html(Table(KEYS, key_rows(everything.tensors)))
        yield details_html(
            f"each of {plural(len(everything.tensors), 'tensor')}", _html(tensor_table(everything.tensors))
        )
    if everything.objects:
        yield element_html("h2", f"{name}objects")
        yield _html(object_table(everything.objects))
    yield element_html("h2", f"{name}common state")
    if side.findings.problem is not None:
        yield from _lines(_in_the_shell(side.findings.problem))
    else:
        yield _html(Table(COMMON, list(common_rows(side.findings.common))))


def _html(table: Table, most: int = _MOST_ROWS) -> str:
    headings = [heading.name for heading in table.headings]
    numbers = [place for place, heading in enumerate(table.headings) if heading.right]
    more = len(table.rows) - most
    left_out = element_html("p", f"and {more:,} more", "dim") if more > 0 else ""
    return table_html(headings, table.rows[:most], numbers=numbers) + left_out


def _damage(side: Side, name: str) -> Iterator[str]:
    if side.verification is not None and side.verification.damage:
        yield element_html("h2", f"{name}damage")
        rows = [
            (
                damage.file,
                f"{damage.begin:,} to {damage.end:,}" if damage.end else "all",
                " ".join(damage.what.split()),
                ", ".join(shorten(damage.holds)),
            )
            for damage in side.verification.damage
        ]
        headings = [Heading("file"), Heading("bytes", right=True), Heading("what"), Heading("what lies there")]
        yield _html(Table(headings, rows))
    for line in unchecked_lines(side.verification) if side.verification is not None else ():
        yield element_html("p", f"{name}{line}", "dim")


def _figure(tree: OpenCheckpoint) -> Iterator[str]:
    try:
        picture = draw(tree).picture
        # The last row's bars are left out, since the sizes above show them.
        yield figure_html(replace(picture, rows=picture.rows[:-1]))
    except StrategyError as error:  # The format has no index.
        yield element_html("p", str(error), "dim")


# This section shows sizes by dtype and rank.


def _sizes(tree: OpenCheckpoint, tensors: Sequence[TensorRow]) -> Iterator[str]:
    by_dtype = Counter[str]()
    for row in tensors:
        by_dtype[row.dtype] += row.length
    shares = _shares(tree)
    dtypes = [name for name, _ in by_dtype.most_common()]
    totals = {name: sum(share.values()) for name, share in shares.items()}
    whose = "rank" if all(name.startswith("rank ") for name in shares) else "file"
    panels = [_bars("bytes by dtype", dict(by_dtype.most_common()))]
    if all(len(name) <= _LONGEST_NAME for name in totals):
        panels.append(_bars(f"bytes by {whose}", totals))
    yield figure_html(Picture(f"{size(by_dtype.total())} in tensors", (tuple(bars for bars in panels if bars.bars),)))
    if shares:
        headings = [Heading(whose), Heading("bytes", right=True), *(Heading(dtype, right=True) for dtype in dtypes)]
        rows = [
            (name, size(totals[name]), *(size(share[dtype]) if share[dtype] else "" for dtype in dtypes))
            for name, share in shares.items()
        ]
        yield _html(Table(headings, rows), _MOST_SHARES)


def _bars(heading: str, amounts: dict[str, int]) -> Bars:
    largest = list(amounts.items())[:_MOST_BARS]
    more = f"and {len(amounts) - _MOST_BARS:,} more" if len(amounts) > _MOST_BARS else ""
    return Bars(heading, tuple(Bar(name, nbytes, size(nbytes)) for name, nbytes in largest), more)


def _shares(tree: OpenCheckpoint) -> dict[str, Counter[str]]:
    """Return the number of bytes of each dtype that each rank wrote, as ``{"rank 0": {dtype: bytes}}``.

    If a file's name doesn't tell its rank, the outer keys are file names. Without an index, the result is empty.
    """
    index = stored_index(tree)
    if index is None or not index.chunk_key.size:
        return {}
    files, dtypes = index.file_names(), texts(index.dtype_text, index.dtype_start)
    places = index.chunk_file, index.key_dtype[index.chunk_key]
    nbytes = group_sums(places, index.chunk_length, (len(files), len(dtypes)))
    files_used = np.flatnonzero(nbytes.any(axis=1)).tolist()
    ranks = [_OF_RANK.fullmatch(files[file]) for file in files_used]
    names = [f"rank {int(rank[1] or rank[2])}" if rank is not None else "" for rank in ranks]
    if not all(names):
        names = [files[file] for file in files_used]
    shares = defaultdict[str, Counter[str]](Counter)
    for name, file in zip(names, files_used, strict=True):
        shares[name].update(dict(zip(dtypes, nbytes[file].tolist(), strict=True)))
    order = sorted(shares, key=lambda name: (int(name[5:]) if name.startswith("rank ") else 0, name))
    return {name: shares[name] for name in order}


# This section shows differences.


def _differences(outcome: ComparedPair) -> Iterator[str]:
    if outcome.difference:
        yield element_html("h2", "differences")
        yield from map(_html, difference_tables(outcome))
    left, right = ({row.key: row for row in side.contents.tensors} for side in (outcome.left, outcome.right))
    both = [(left[key], right[key]) for key in left if key in right]
    other = [(one, two) for one, two in both if cut_text(one.grid) != cut_text(two.grid)]
    if other:
        yield element_html("h2", "cut otherwise")
        headings = [
            Heading("tensor"),
            Heading("dtype"),
            *(Heading(name, right=True) for name in ("shape", "cut in A", "cut in B")),
        ]
        rows = [(a.key, a.dtype, shape_text(a.shape), cut_text(a.grid), cut_text(b.grid)) for a, b in other]
        yield _html(Table(headings, rows))
        # The picture shows the largest of these tensors with both cuts.
        key = max(other, key=lambda pair: pair[0].length)[0].key
        with suppress(StrategyError):  # A format has no index.
            pictures = [stored_picture(side.tree.stored_layout(key)) for side in (outcome.left, outcome.right)]
            firsts = [picture.rows[0][0] for picture in pictures]
            planes = [replace(plane, heading=f"in {name}") for name, plane in zip("AB", firsts, strict=True)]
            yield figure_html(Picture(pictures[0].title, (tuple(planes),), is_step=True))
