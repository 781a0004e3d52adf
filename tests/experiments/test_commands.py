"""The commands: the order in which experiments are read, how long a command is, what --help says.

A command imports the harness and the pictures, never another command; in the harness a module
imports only modules above it. `ORDER` is what the harness's own docstring says.
"""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import __main__ as listing
from experiments import harness
from fisherjax import algorithms

ROOT = Path(__file__).resolve().parents[2] / "experiments"

ORDER = [
    *("names", "imported", "program_cache", "hosts", "tables", "records", "decoded", "choices"),
    *("option_groups", "commands", "papers", "folders", "figures", "drawings"),
    *("config", "titles", "limits", "methods", "votes", "tasks"),
    *("checkpoints", "steps", "kept_clients", "after_merge", "one_round", "accuracies", "memory"),
    *("progress", "forecast", "grids", "grid_runs", "reference", "trained_clients", "studies"),
]
MOST_LINES = 150

FILES = {path.relative_to(ROOT).with_suffix("").as_posix(): path for path in ROOT.rglob("*.py")}
HARNESS = [name for name in FILES if name.startswith("harness/") and not name.endswith("__init__")]
STUDIES = sorted({name.partition("/")[0] for name in FILES if "/" in name} - {"harness"})
STUDIED = [name for name in FILES if name.partition("/")[0] in STUDIES]
MAINS = [f"{study}/__main__" for study in STUDIES]
# The main module of flower chooses among commands, which have modules of their own.
READERS = [name for name in MAINS if name != "flower/__main__"]
READERS += [
    f"flower/{name}" for name in ("keys", "superlink", "supernodes", "submit", "load/__main__")
]


def imports_of(name: str) -> set[str]:
    """Return the files of experiments that one imports: "harness/tables" for tables.csv_text."""
    found = set()
    for node in ast.walk(ast.parse(FILES[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}, line {node.lineno}: write the whole module name"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    own = [words.split(".")[1:] for words in found if words.split(".")[0] == "experiments"]
    paths = [["/".join(words[:end]) for end in range(len(words), 0, -1)] for words in own]
    # A name that is no file is defined in the last that is one, or in a folder's __init__.
    return {next((path for path in own if path in FILES), own[-1]) for own in paths}


# Order


def test_the_harness_says_in_which_order_it_is_read():
    _, _, told = harness.__doc__.partition("\n\n")
    groups = re.findall(r"(?:^|\. )([\w, ]+):", " ".join(told.split()))
    assert [name for group in groups for name in group.split(", ")] == ORDER


def test_every_module_of_the_harness_has_its_place():
    assert {name.removeprefix("harness/") for name in HARNESS} == set(ORDER)


@pytest.mark.parametrize("name", HARNESS)
def test_a_module_of_the_harness_imports_only_modules_above_it(name):
    above = ORDER[: ORDER.index(name.removeprefix("harness/"))]
    assert imports_of(name) <= {f"harness/{module}" for module in above}


@pytest.mark.parametrize("name", STUDIED)
def test_a_study_imports_the_harness_and_itself_and_no_other_study(name):
    study = name.partition("/")[0]
    own = [other for other in STUDIED if other.partition("/")[0] == study]
    assert imports_of(name) <= {*HARNESS, *own}


@pytest.mark.parametrize("name", ORDER)
def test_the_harness_has_only_what_two_studies_use(name):
    module = f"harness/{name}"
    users = {other.partition("/")[0] for other in STUDIED if module in imports_of(other)}
    assert len(users) > 1 or any(module in imports_of(other) for other in HARNESS)


# Length


@pytest.mark.parametrize("name", MAINS)
def test_a_command_is_short(name):
    assert len(FILES[name].read_text().splitlines()) <= MOST_LINES


# The list of commands


def test_the_list_has_every_command_with_the_first_line_of_its_docstring(capsys):
    assert listing.main([]) == 0
    shown = [re.fullmatch(r"  (\w+) +(\S.*)", x) for x in capsys.readouterr().out.splitlines()[2:]]
    expected = {
        name.removesuffix("/__main__"): module_of(name).__doc__.splitlines()[0] for name in MAINS
    }
    assert {match[1]: match[2] for match in shown} == expected
    assert [match[1] for match in shown] == sorted(expected)


def test_each_line_of_the_list_is_a_sentence_that_begins_with_a_verb_of_the_field():
    verbs = "Attack|Compare|Compute|Draw|List|Measure|Merge|Run|Train"
    for name, told in listing.commands().items():
        assert re.fullmatch(rf"({verbs}) .*\.", told), f"{name}: {told}"


@pytest.mark.parametrize(
    ("asked", "nearest"),
    [("one_sot", "one_shot"), ("fedlpa_picture", "fedlpa_pictures"), ("secured", "secure")],
)
def test_a_command_that_does_not_exist_is_refused_with_the_three_nearest(asked, nearest, capsys):
    assert listing.main([asked]) == 2
    told = capsys.readouterr()
    assert not told.out
    names = re.search(r"the nearest are (\w+), (\w+), (\w+);", told.err).groups()
    assert names[0] == nearest
    assert set(names) < set(listing.commands())
    assert len(set(names)) == 3


def test_the_name_of_a_command_alone_is_answered_with_how_to_run_it(capsys):
    for name in listing.commands():
        assert listing.main([name]) == 2
        assert f"python -m experiments.{name}\n" in capsys.readouterr().err


def test_python_itself_runs_the_list_and_refuses_a_module_that_does_not_exist():
    def run(*words):
        return subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True)

    shown = run("experiments")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "one_shot" in shown.stdout
    assert run("experiments", "nothing").returncode == 2
    missing = run("experiments.nothing")
    assert missing.returncode == 1
    assert "No module named experiments.nothing" in missing.stderr


def test_the_page_on_commands_names_every_command():
    page = (ROOT.parent / "docs/how_to/commands.md").read_text()
    rows = re.findall(r"^\| `python -m experiments\.(\w+)` \|", page, re.MULTILINE)
    assert sorted(rows) == sorted(listing.commands())


# Help


def module_of(name: str):
    return importlib.import_module(f"experiments.{name.replace('/', '.')}")


def help_of(name: str, capsys, monkeypatch) -> tuple[dict[str, str], dict[str, str]]:
    """Return what --help says of each group and of each option, by their names."""
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as stop:
        # Options of methods are shown for those that are named.
        module_of(name).main(["--help", "--algorithms", *algorithms.merges(), "fedov+student"])
    assert stop.value.code == 0
    groups: dict[str, str] = {}
    options: dict[str, str] = {}
    where, last = groups, ""
    # With frames of lines or without, as the terminal can show them.
    for line in re.sub("[│╭╮╰╯─]", "-", capsys.readouterr().out).splitlines():
        line = line.removeprefix("-").rstrip(" -")
        if title := re.fullmatch(r"[ -]*((\S+ )?options)", line):
            where, last = groups, title[1]
            groups[last] = ""
        elif option := re.fullmatch(r" {0,2}(--?\w[\w.-]*).*?(  .*)?", line):
            where, last = options, option[1]
            options[last] = (option[2] or "").strip()
        elif last and (where is groups or line.startswith(4 * " ")):  # else names of choices
            where[last] = f"{where[last]} {line.strip()}".strip()
    return groups, options


@pytest.mark.parametrize("name", READERS)
def test_help_has_a_sentence_for_every_group_and_every_option(name, capsys, monkeypatch):
    groups, options = help_of(name, capsys, monkeypatch)
    assert groups.pop("options") == ""
    for group, text in groups.items():
        assert re.fullmatch(r"[^a-z].*\.", text), f"{group}: {text}"
    assert options.pop("-h") == "show this help message and exit"
    assert len(options) > 1
    for option, text in options.items():
        assert re.fullmatch(r"[^a-z(].*\. \((default: .*|required)\)", text), f"{option}: {text}"


@pytest.mark.parametrize("name", MAINS)
def test_help_begins_with_an_example_of_the_command(name):
    study, _, _ = name.partition("/")
    _, example, *_ = module_of(name).__doc__.split("\n\n")
    assert example.startswith(f"    python -m experiments.{study} ")


def test_help_of_one_round_is_read_on_two_screens_and_says_how_to_see_more(capsys):
    shown = []
    for named in ([], ["--algorithms", "fedprox@mu=0.1"]):
        with pytest.raises(SystemExit):
            module_of("one_shot/__main__").main([*named, "--help"])
        shown.append(capsys.readouterr().out)
    short, long = shown
    assert len(short.splitlines()) < 160
    assert "python -m experiments.one_shot --algorithms fedprox fedfisher_kfac --help" in short
    assert "--fedprox.mu FLOAT" not in short
    assert "--fedprox.mu FLOAT" in long
    assert "--fedlpa.damping" not in long


@pytest.mark.parametrize("name", READERS)
def test_an_option_that_does_not_exist_is_refused(name, capsys):
    with pytest.raises(SystemExit) as stop:
        module_of(name).main(["--no-such-option"])
    assert stop.value.code == 2
    assert f"python -m {module_of(name).PROGRAM} --help" in capsys.readouterr().err
