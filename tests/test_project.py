"""What a package index, a citation and a stranger's first commands read of the project."""

import argparse
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

import fisherjax
from fisherjax import _command_line

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
REPOSITORY = PROJECT["project"]["urls"]["Repository"]


def test_the_citation_is_of_this_version_and_repository():
    yaml = pytest.importorskip("yaml")
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    # What the format requires, https://citation-file-format.github.io.
    assert {"cff-version", "message", "title", "authors"} <= set(found)
    assert found["version"] == fisherjax.__version__
    assert found["repository-code"] == REPOSITORY
    assert found["license"] == PROJECT["project"]["license"]
    assert all({"type", "title", "authors"} <= set(paper) for paper in found["references"])


def test_the_newest_entry_of_the_changelog_is_this_version():
    newest, *_ = re.findall(r"^## \[(\S+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest == fisherjax.__version__


def test_addresses_of_the_project_lead_into_its_repository():
    urls = PROJECT["project"]["urls"]
    assert {"Repository", "Documentation", "Changelog", "Issues"} <= set(urls)
    for url in urls.values():
        assert url.startswith(REPOSITORY)
        _, inside, path = url.partition("/main/")
        assert not inside or (ROOT / path).exists()


def test_the_source_distribution_has_all_that_git_has_but_the_workflows_of_its_host():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode or not listed.stdout:
        pytest.skip("no checkout of git")
    tops = {name.partition("/")[0] for name in listed.stdout.splitlines()}
    patterns = PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    included = {path.name for pattern in patterns for path in ROOT.glob(pattern[1:])}
    # hatchling itself adds these.
    included |= {"pyproject.toml", "LICENSE", "README.md", ".gitignore"}
    assert tops - included == {".github"}


# Notebooks


def first_cell(notebook: Path) -> str:
    """Return the first cell of code of a notebook's source."""
    return notebook.read_text().split("# %%\n", 2)[1].strip()


NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.py"))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda x: x.stem)
def test_a_notebook_begins_by_installing_what_the_readme_installs_and_checks_the_machine(notebook):
    (source,) = re.findall(r"pip install '(.*)'", (ROOT / "README.md").read_text())
    cell = first_cell(notebook)
    assert f'"{source}"' in cell
    # Colab's own jax stays.
    assert re.search(r"install --quiet '\{source\}'( equinox)? jax==\{version\('jax'\)\}\"", cell)
    assert re.search(r"print\(.*fj\.__version__.*jax\.__version__.*device_kind", cell)
    assert "fj.devices.self_check()" in cell
    assert "git clone" not in notebook.read_text()


def test_notebooks_begin_alike_and_import_no_checkout():
    cells = {first_cell(notebook).replace(" equinox", "") for notebook in NOTEBOOKS}
    assert len(cells) == 1
    page = (ROOT / "docs/get_started/colab.md").read_text()
    (said,) = re.findall(r"```py\n(.*?)```", page, re.DOTALL)
    assert set(re.findall(r"fj\.[\w.]+", said)) == set(re.findall(r"fj\.[\w.]+", cells.pop()))
    for notebook in NOTEBOOKS:
        # A function may need a checkout, and then does without where there is none.
        assert not re.search(r"^(from|import) experiments", notebook.read_text(), re.MULTILINE)


# Help


@pytest.fixture(scope="module")
def helps() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of the program, under "", and of each of its commands."""
    made = _command_line.parser("What it does.", dict.fromkeys(_command_line.HELP, print))
    (commands,) = (x for x in made._actions if isinstance(x, argparse._SubParsersAction))
    return {"": made, **commands.choices}


def test_each_example_in_the_help_can_be_parsed(helps):
    for name, parser in helps.items():
        lines = re.findall(r"^  python -m fisherjax (.*)$", parser.format_help(), re.MULTILINE)
        assert lines, name
        for line in lines:
            helps[""].parse_args(shlex.split(line))
            assert line.startswith(name)


def test_the_help_of_a_command_has_a_sentence_for_every_option(helps):
    for name, parser in helps.items():
        assert re.fullmatch(r"[A-Z].*\.", parser.description)
        for action in parser._actions:
            has_text = isinstance(action, argparse._SubParsersAction) or action.help
            assert has_text, (name, action.dest)
