"""The result of a run: its rows as JSON and as a table, and ratios between rows. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any


def significant(value: float, digits: int = 4) -> float:
    """``value`` rounded to so many significant digits."""
    return float(f"{value:.{digits}g}")


@dataclass(frozen=True)
class Row:
    """One implementation of one layer at one number of tokens.

    Attributes:
        op: "dense", "blast", "monarch" or "low_rank".
        layer: as in ``cases.LAYERS``.
        tokens: rows of x.
        impl: "dense", "dense_compiled", "cublas" (low rank by two products of PyTorch), "eager"
            and "compiled" (the reference in PyTorch), "ref" (the paper's kernels, without bias),
            a path's name, "int8" (BLAST with weights and products in 8-bit integers), or "auto"
            (what ``Backend.AUTO`` takes).
        structure: in words, with blocks and rank.
        in_features, out_features: of the layer.
        dtype: of x, weights and output.
        copies: layers that share x in this call; the figures are those of all of them.
        median_us, p10_us, p90_us: microseconds of a call; None if it was not timed.
        rms: root mean square of the error against fp32, relative to that of the output.
        max: largest error, relative to the output's largest magnitude.
        bytes, flops: compulsory traffic and products of matrices (``blr_kernels.roofline``).
        bound_us: least time they allow on this device; None where its ceilings are not known.
        percent_of_bound: ``bound_us`` in per cent of ``median_us``.
        scratch_bytes: peak memory of a call above its input and output.
        path: what "auto" or "ref" took.
        error: why there is no figure.
    """

    op: str
    layer: str
    tokens: int
    impl: str
    structure: str
    in_features: int
    out_features: int
    dtype: str
    copies: int = 1
    median_us: float | None = None
    p10_us: float | None = None
    p90_us: float | None = None
    rms: float | None = None
    max: float | None = None
    bytes: int | None = None
    flops: int | None = None
    bound_us: float | None = None
    percent_of_bound: float | None = None
    scratch_bytes: int | None = None
    path: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class Report:
    """A run.

    Attributes:
        device: name of the GPU, or "cpu".
        versions: of what was used, by name.
        commit: of this repository, with a "+" if files differed from it.
        date: UTC, ISO 8601.
        method: how the figures were taken, in words.
        rows: in the order they were measured.
    """

    device: str
    versions: Mapping[str, str]
    commit: str
    date: str
    method: str
    rows: Sequence[Row]

    def to_json(self) -> str:
        """Compact JSON, one row a line; what is None is left out, as are copies of 1."""
        head = {
            field.name: getattr(self, field.name) for field in fields(self) if field.name != "rows"
        }
        head["versions"] = dict(self.versions)
        lines = ",\n".join(_compact(row) for row in self.rows)
        return f'{json.dumps(head, indent=1)[:-2]},\n "rows": [\n{lines}\n]}}\n'

    @staticmethod
    def from_json(text: str) -> Report:
        """Reads what ``to_json`` wrote.

        Raises:
            ValueError: if a key is missing or not known.
        """
        data = json.loads(text)
        if not isinstance(data, dict):
            raise ValueError(f"a report must be an object, got {type(data).__name__}")
        rows = [_checked(Row, row) for row in data.pop("rows", ())]
        return _checked(Report, {**data, "rows": rows})


def _compact(row: Row) -> str:
    known = {name: value for name, value in asdict(row).items() if value is not None}
    if row.copies == 1:
        del known["copies"]
    return json.dumps(known, separators=(",", ":"))


def _checked(kind: Any, data: Mapping[str, Any]) -> Any:
    known = {field.name for field in fields(kind)}
    if set(data) - known:
        raise ValueError(f"unknown keys in a {kind.__name__}: {sorted(set(data) - known)}")
    try:
        return kind(**data)
    except TypeError as error:
        raise ValueError(str(error)) from None


def times_as_fast(row: Row, base: Row) -> float | None:
    """How many times as fast as ``base`` a row is: above 1 it is faster; None without times."""
    if not row.median_us or not base.median_us:
        return None
    return base.median_us / row.median_us


class Ratios:
    """Looks up what the rows of a report are compared with."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._dense: dict[tuple[str, int, str], Row] = {}
        self._ref: dict[tuple[str, str, int, str], Row] = {}
        for row in rows:
            if row.impl == "dense":
                self._dense[row.layer, row.tokens, row.dtype] = row
            elif row.impl == "ref":
                self._ref[row.op, row.layer, row.tokens, row.dtype] = row

    def vs_dense(self, row: Row) -> float | None:
        """Against the dense layer at the same number of tokens, not compiled."""
        base = self._dense.get((row.layer, row.tokens, row.dtype))
        return None if base is None else times_as_fast(row, base)

    def vs_ref(self, row: Row) -> float | None:
        """Against the paper's kernels for the same op."""
        base = self._ref.get((row.op, row.layer, row.tokens, row.dtype))
        return None if base is None else times_as_fast(row, base)


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


HEADER = (
    f"{'layer':13}{'tokens':>7}  {'structure':18}{'impl':15}{'us':>9}{'p10':>9}{'p90':>9}"
    f"{'rms':>9}{'max':>9}{'bound':>7}{'scratch':>9}{'x dense':>8}{'x ref':>7}"
)


def line(row: Row, ratios: Ratios) -> str:
    """A row of the table under ``HEADER``."""
    start = f"{row.layer:13}{row.tokens:7}  {row.structure:18}{row.impl:15}"
    if row.error is not None:
        return f"{start} {row.error}"
    bound = "-" if row.percent_of_bound is None else f"{row.percent_of_bound:.0f}%"
    mib = None if row.scratch_bytes is None else row.scratch_bytes / 2**20
    text = (
        f"{start}{_shown(row.median_us, '.2f'):>9}{_shown(row.p10_us, '.2f'):>9}"
        f"{_shown(row.p90_us, '.2f'):>9}{_shown(row.rms, '.1e'):>9}{_shown(row.max, '.1e'):>9}"
        f"{bound:>7}{_shown(mib, '.1f'):>9}{_shown(ratios.vs_dense(row), '.2f'):>8}"
        f"{_shown(ratios.vs_ref(row), '.2f'):>7}"
    )
    return text if row.path is None else f"{text}  {row.path}"


def table(report: Report) -> str:
    """All rows as text; scratch is in MiB, ratios say how many times as fast a row is."""
    ratios = Ratios(report.rows)
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    head = f"{report.device}; {versions}; commit {report.commit}; {report.date}"
    return "\n".join([head, HEADER, *(line(row, ratios) for row in report.rows)])
