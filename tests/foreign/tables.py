"""The table at the end: worst errors and failures, by quantity and framework."""

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from tests.foreign import cells, processes
from tests.foreign.processes import Answer, Finding

EXPECTED = "expected on this version: the user's own program"


def is_expected(finding: Finding) -> bool:
    """Whether a failure is one that no library can prevent on this version."""
    is_users = cells.named(finding.cell).users_form and finding.quantity != "stopped"
    return is_users and processes.is_affected()


def is_failure(finding: Finding) -> bool:
    """Whether a finding is wrong, and should not be."""
    return not finding.is_right and not is_expected(finding)


def show(answers: list[Answer], versions: str, seconds: float) -> None:
    """Print what failed, the table, and what was verified."""
    console = Console(width=None if Console().is_terminal else 140)
    found = [finding for answer in answers for finding in answer.findings]
    for finding in filter(is_failure, found):
        where = f"{finding.cell}: {finding.quantity}"
        console.print(f"FAILED {where} {finding.error:.1e} {finding.message}", markup=False)
    console.print(_table(found))
    failed = {finding.cell for finding in found if is_failure(finding)}
    expected = {f.cell for f in found if not f.is_right and is_expected(f)}
    console.print(
        f"{len(answers)} programs in {seconds:.0f} s: {len(failed)} failed, "
        f"{len(expected)} failed as expected on this version.\n{versions}",
        highlight=False,
        soft_wrap=True,
    )


def _table(found: list[Finding]) -> Table:
    table = Table("", *cells.FACTORS["framework"], title="Worst relative error (failures)")
    rows: dict[str, list[Finding]] = {}
    for finding in found:
        rows.setdefault(_row(finding), []).append(finding)
    for name in sorted(rows, key=_order):
        columns = [
            _entry(f for f in rows[name] if f.cell.startswith(f"{framework}/"))
            for framework in cells.FACTORS["framework"]
        ]
        table.add_row(name, *columns)
    return table


def _row(finding: Finding) -> str:
    if is_expected(finding):
        return EXPECTED
    cell = cells.named(finding.cell)
    return f"{cell.program}: {finding.quantity}, {cell.dtype}"


def _order(row: str) -> tuple[int, str]:
    programs = cells.FACTORS["program"]
    name = row.split(":")[0]
    return (programs.index(name) if name in programs else len(programs), row)


def _entry(findings: Iterable[Finding]) -> str:
    some = list(findings)
    if not some:
        return ""
    wrong = sum(not finding.is_right for finding in some)
    return f"{max(finding.error for finding in some):.1e}" + f" ({wrong})" * bool(wrong)
