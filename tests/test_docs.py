"""The documents say what the repository's files say."""

import re
from pathlib import Path

import pytest
from scripts import validation_tables

import poros

ROOT = Path(__file__).resolve().parent.parent


def test_the_validation_page_is_what_its_rows_give():
    page = (ROOT / "docs" / "validation" / "README.md").read_text()
    assert page == validation_tables.render(), "run scripts/validation_tables.py"


def test_the_readmes_table_is_what_the_rows_give():
    text = (ROOT / "README.md").read_text()
    assert text == validation_tables.render_readme(text), "run scripts/validation_tables.py"


@pytest.mark.parametrize("engine", ["eager", "replay"])
def test_every_parity_row_passed_and_its_control_too(engine):
    for row in validation_tables.read_rows(f"h200_parity_{engine}.jsonl"):
        assert row["engine"] == engine
        assert row["verdict"] == "PASS"
        assert all(row["surfaces"]["streamed"].values())
        assert all(row["surfaces"]["control"].values())


def test_a_speed_figure_is_the_median_of_its_steps():
    for row in validation_tables.read_rows(validation_tables.SPEED):
        steps = sorted(row["passes"][0])
        assert len(steps) == row["steps"]
        assert row["s_per_step"] == steps[len(steps) // 2]


def test_the_version_has_a_place_in_the_changelog():
    assert f"## [{poros.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize(
    "page", sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("**/*.md") if ".venv" not in path.parts)
)
def test_links_between_pages_lead_somewhere(page):
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
        assert ((ROOT / page).parent / target).exists(), target
