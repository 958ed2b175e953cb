"""`check_data` and `check_object`: read the rows, gather, judge."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from whynan.forensics.addresses import Place, Unreadable
from whynan.forensics.data.judging import judge_batches, judge_column, judge_duplicates, merged
from whynan.forensics.data.keys import keys_of
from whynan.forensics.data.recognising import READERS, recognise
from whynan.forensics.data.roles import Role, unmet
from whynan.forensics.data.sameness import ConstantBatches, Duplicates, KeyStore, find_duplicates
from whynan.forensics.data.tables import Block, Sort, Table, Trouble
from whynan.forensics.data.tally import Tally
from whynan.forensics.findings import Checked, Finding, Kind, Severity
from whynan.forensics.wishes import Wishes
from whynan.records import Json, TensorStats, count

_SHOWN = 64  # columns whose statistics are told


@dataclass(slots=True)
class Look:
    """What one table showed."""

    table: Table
    rows: int = 0
    size: int = 0
    findings: list[Finding] = field(default_factory=list)
    tallies: list[Tally] = field(default_factory=list)
    unreadable: str = ""


def check_data(place: Place, wishes: Wishes) -> Checked:
    """Check a data set on disk: rows that are not finite, missing, empty, repeated or out of range, and what they would do to a batch.

    Raises `Unreadable` where it is none, or cannot be opened.

    Cost: one reading of the file; a second one where rows seem to repeat. Memory does not grow with the file beyond 64 MB for row keys.
    """
    form = recognise(place)
    if form is None:
        raise Unreadable("not a data set that whynan knows")
    return _check(place, form, wishes)


def _check(place: Place, form: str, wishes: Wishes) -> Checked:
    if form.startswith("image"):
        from whynan.forensics.data.images import check_images

        return check_images(place, wishes)
    return check_tables(str(place), form, READERS[form](place), wishes)


def check_object(spec: str, wishes: Wishes) -> Checked:
    """Check a data set of the user's own code, named `module:dataset`: a data set, an iterable, a DataLoader, or a callable that returns one."""
    from whynan.forensics.data.objects import tables_of_object

    form, tables = tables_of_object(spec)
    return check_tables(spec, form, tables, wishes)


def check_tables(path: str, form: str, tables: list[Table], wishes: Wishes) -> Checked:
    """Look at every table, and put together what was seen."""
    looks = [_look(table, wishes) for table in tables]
    shared = [n for n, times in Counter(c.name for t in tables for c in t.columns).items() if times > 1]
    findings = [_under(look.table.name, f, shared) for look in looks for f in look.findings] if len(looks) > 1 else list(looks[0].findings)
    findings += [
        Finding(Severity.NOTE, "no-such-column", f"--range {wish}: no column has this name", wish)
        for wish in unmet(wishes.ranges, (c for t in tables for c in t.columns))
    ]
    return Checked(
        path,
        Kind.DATA,
        form,
        sum(look.size for look in looks),
        findings=tuple(findings),
        tensors=tuple(_stats(t) for look in looks for t in look.tallies[:_SHOWN] if t.column.numeric),
        facts=_facts(looks),
        unreadable=next((look.unreadable for look in looks if look.unreadable), ""),
    )


def _under(table: str, found: Finding, shared: list[str]) -> Finding:
    """Say which table is meant where the column alone does not."""
    if found.place and found.place not in shared:
        return found
    return replace(found, place=".".join(filter(None, (table, found.place))))


def _look(table: Table, wishes: Wishes) -> Look:
    look = Look(table)
    batch = max(1, table.batch or wishes.batch)
    kept = [n for n, c in enumerate(table.columns) if not any(fnmatchcase(c.name, p) for p in wishes.allow)]
    look.tallies = [Tally(table.columns[n], wishes, batch) for n in kept]
    rows = _Rows(look.tallies, kept, batch)
    try:
        for block in table.blocks():
            for tally, n in zip(look.tallies, kept, strict=True):
                tally.add(block.pieces[n], look.rows)
            rows.add(block, look.rows)
            look.rows, look.size = look.rows + block.rows, look.size + block.size
            wishes.tick(block.size)
        repeats = rows.repeats(table)
    except Unreadable as why:
        look.unreadable, repeats = str(why), Duplicates()
    if not look.rows and not look.unreadable:
        look.unreadable = "" if any(t.count for t in table.troubles) else "no rows"
    look.findings = _judge(look, rows, repeats)
    return look


class _Rows:
    """What is gathered of whole rows; nothing where a row is one number, which repeats by nature."""

    def __init__(self, tallies: list[Tally], kept: list[int], batch: int) -> None:
        self._pairs = pairs = list(zip(tallies, kept, strict=True))
        self._all = tuple(n for t, n in pairs if t.role is not Role.NUMBERING)
        inputs = [(t, n) for t, n in pairs if t.role not in (Role.NUMBERING, Role.LABEL, Role.MASK)]
        told = len(inputs) > 1 or any(not t.column.scalar or t.column.sort is Sort.FLOAT for t, _ in inputs)
        self._inputs = tuple(n for _, n in inputs) if told else ()
        self._store = KeyStore() if self._inputs and (len(self._all) > 1 or not inputs[0][0].column.scalar) else None
        self.constant = ConstantBatches(batch, self._inputs) if self._inputs else None

    @property
    def groups_inputs(self) -> bool:
        """Whether rows that repeat are those whose inputs do, whatever their labels."""
        return self._all == self._inputs

    def add(self, block: Block, start: int) -> None:
        if self.constant is None:
            return
        keys = keys_of(block, self._inputs)
        self.constant.add(block, keys, start)
        if self._store is not None:
            self._store.add(keys if self._all == self._inputs else keys_of(block, self._all), start)

    def repeats(self, table: Table) -> Duplicates:
        telling = frozenset(n for t, n in self._pairs if t.telling)
        return find_duplicates(table, self._store, self._all, telling) if self._store is not None and table.again else Duplicates()


def _judge(look: Look, rows: _Rows, repeats: Duplicates) -> list[Finding]:
    found = [f for tally in look.tallies for f in judge_column(tally, look.rows)] if look.rows else []
    raised = [tuple(t.places) for t in look.table.troubles if t.what == "item-raises" and t.count]
    found = [_with_line(f, look.table) for f in merged(found) if not (f.what == "missing" and f.rows in raised)]
    if rows.constant is not None and look.rows:
        found += judge_batches(rows.constant.marks, look.rows, repeats.largest if rows.groups_inputs and repeats.share == 1 else 0)
    found += judge_duplicates(repeats, look.rows, look.tallies)
    found += [_trouble(t) for t in look.table.troubles if t.count]
    found += [Finding(Severity.NOTE, "reading", note) for note in look.table.notes]
    order = list(Severity)
    return sorted(found, key=lambda f: order.index(f.severity))


def _with_line(found: Finding, table: Table) -> Finding:
    return replace(found, line=table.line_of(found.rows[0])) if table.line_of is not None and found.rows else found


def _trouble(trouble: Trouble) -> Finding:
    severity = Severity.BAD if trouble.bad else Severity.SUSPECT
    if not trouble.unit:
        return Finding(severity, trouble.what, trouble.message)
    listed = ", ".join(map(str, trouble.places[:5])) + (", …" if trouble.count > 5 else "")
    message = f"{trouble.message}: {count(trouble.count)}, {trouble.unit}{'s' * (trouble.count > 1)} {listed}"
    in_text = trouble.unit == "line"
    return Finding(
        severity, trouble.what, message, rows=() if in_text else tuple(trouble.places), row_count=trouble.count, line=trouble.places[0] if in_text else 0
    )


def _stats(tally: Tally) -> TensorStats:
    known = tally.numbers > 0
    shape = (tally.rows, *(tally.column.shape or ()))
    return TensorStats(
        tally.column.name,
        tally.column.dtype,
        shape,
        tally.nan,
        tally.posinf,
        tally.neginf,
        tally.zeros,
        tally.low if known else None,
        tally.high if known else None,
    )


def _facts(looks: list[Look]) -> dict[str, Json]:
    if len(looks) == 1:
        return _table_facts(looks[0])
    return {"rows": sum(look.rows for look in looks), "tables": {look.table.name or str(n): _table_facts(look) for n, look in enumerate(looks)}}


def _table_facts(look: Look) -> dict[str, Json]:
    columns: dict[str, Json] = {t.column.name or "values": _column_facts(t) for t in look.tallies[:_SHOWN]}
    return {"rows": look.rows, "column_count": len(look.table.columns), "columns": columns}


def _column_facts(tally: Tally) -> Json:
    facts: dict[str, Json] = {"dtype": tally.column.dtype, "role": str(tally.role)}
    if tally.column.shape:
        facts["shape"] = list(tally.column.shape)
    if tally.numbers:
        facts |= {"min": tally.low, "max": tally.high, "mean": tally.mean, "std": tally.deviation}
    return facts
