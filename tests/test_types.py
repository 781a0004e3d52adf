"""What a type checker finds in scripts that use the library; `make types` checks the library."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# A right script, and one whose comments name the rule that a line is against.
RIGHT, WRONG = ROOT / "tests/types/user.py", ROOT / "tests/types/wrong.py"
PLACES = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
CHECKER = shutil.which("basedpyright", path=PLACES)


@pytest.fixture(scope="module")
def errors() -> dict[Path, set[tuple[int, str]]]:
    """Return the line and the rule of every error, by file."""
    command = [CHECKER, "--pythonpath", sys.executable, "--outputjson", RIGHT, WRONG]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    found = {RIGHT: set(), WRONG: set()}
    for one in json.loads(result.stdout)["generalDiagnostics"]:
        if one["severity"] == "error":
            place = one["range"]["start"]["line"] + 1, one.get("rule", one["message"])
            found[Path(one["file"])].add(place)
    return found


needs_the_checker = pytest.mark.skipif(
    CHECKER is None, reason="basedpyright is not installed; it is in the extra 'dev'"
)


@needs_the_checker
@pytest.mark.long
def test_a_right_script_has_no_error(errors):
    assert errors[RIGHT] == set()


@needs_the_checker
@pytest.mark.long
def test_every_wrong_line_is_an_error_and_no_other(errors):
    lines = enumerate(WRONG.read_text().splitlines(), start=1)
    named = ((number, re.search(r"# (report\w+)$", line)) for number, line in lines)
    expected = {(number, rule[1]) for number, rule in named if rule}
    assert len(expected) > 20
    assert errors[WRONG] == expected
