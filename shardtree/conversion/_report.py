"""The report of a conversion that has ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..core.deferred import notebook_html
from ..errors import plural, shorten, size_text
from ._check import CheckResult
from ._plan import Plan


@dataclass(frozen=True, slots=True, repr=False)
class ConversionReport:
    """Result of a conversion.

    Attributes:
        tensors: Number of tensors written.
        objects: Number of objects written.
        nbytes: Size of the tensors in bytes.
        left_out: Keys and unique keys of the source that were left out or dropped by the transform; names of unreadable
            values, such as arrays of texts; and, if the common state was left out, ``"common"`` and the paths of its
            tensors that weren't converted, such as sparse ones.
        unused: (key, number of unused elements) of each tensor that was used only in part.
        batches: Number of batches.
        resumed: Number of batches that an earlier call had written.
        verified_nbytes: Bytes of tensors that were read back and compared; None without a check.
        fingerprints: Fingerprints of the tensors that were read back, by key.
    """

    tensors: int
    objects: int
    nbytes: int
    left_out: tuple[str, ...]
    unused: tuple[tuple[str, int], ...]
    batches: int
    resumed: int
    verified_nbytes: int | None
    fingerprints: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        objects = f" and {plural(self.objects, 'object')}" if self.objects else ""
        batches = f"{self.batches} batch" if self.batches == 1 else f"{self.batches} batches"
        earlier = f", {self.resumed} of them by an earlier call" if self.resumed else ""
        if self.verified_nbytes is None:
            check = "not read back"
        else:
            check = f"{size_text(self.verified_nbytes)} read back and compared, by fingerprint"
        lines = [
            f"{plural(self.tensors, 'tensor')}{objects}, {size_text(self.nbytes)}, in {batches}{earlier}; {check}",
            *_line("left out", self.left_out),
            *_line("used in part", (f"{key}: {count:,} elements" for key, count in self.unused)),
        ]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"ConversionReport({plural(self.tensors, 'tensor')}, {size_text(self.nbytes)})"

    def _repr_html_(self) -> str:
        return notebook_html(self)


def _line(name: str, each: Iterable[str]) -> list[str]:
    text = ", ".join(shorten(each))
    return [f"{name}: {text}"] if text else []


def report_of(plan: Plan, earlier: int, check: CheckResult | None) -> ConversionReport:
    """Return the report of a conversion.

    Args:
        plan: Plan that was carried out.
        earlier: Number of batches that an earlier call had written.
        check: Result of reading back; None if that was skipped.
    """
    return ConversionReport(
        tensors=len({shard.key for shard in plan.tensors}),
        objects=len(plan.objects),
        nbytes=sum(batch.nbytes for batch in plan.batches),
        left_out=plan.left_out,
        unused=plan.unused,
        batches=len(plan.batches),
        resumed=earlier,
        verified_nbytes=None if check is None else check.nbytes,
        fingerprints={} if check is None else check.fingerprints,
    )
