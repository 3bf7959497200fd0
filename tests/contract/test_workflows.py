"""The workflows of GitHub: pinned, with few rights, and in step with the files that they name."""

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def steps(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_is_pinned_and_has_few_rights(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 90
        assert job.get("permissions", {}).keys() <= {"id-token"}
    # An action is code of others: by commit, with the release beside it.
    used = re.findall(r"uses: (.*)", path.read_text())
    assert all(re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40} # v[\d.]+", name) for name in used), used
    for step in steps(workflow):
        # What a person types or names reaches a shell as a variable, never as a part of the script.
        assert "${{" not in step.get("run", "")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_commands_of_a_workflow_exist(path: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for step in steps(yaml.safe_load(path.read_text())):
        command = step.get("run", "")
        assert subprocess.run(["bash", "-n", "-c", command]).returncode == 0
        for target in re.findall(r"^make ([\w-]+)", command, re.MULTILINE):
            assert target in targets
        for name in re.findall(r"(?:^|\s)((?:tools|tests|lab|\.ci)/[\w./]+)", command):
            assert (ROOT / name).exists(), name


def test_the_tests_run_on_both_ends_of_what_is_supported() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    python = re.search(r'requires-python = ">=([\d.]+)"', project)
    torch = re.search(r'dependencies = \["torch>=([\d.]+)"\]', project)
    assert python
    assert torch
    for name in ("ci", "wheels"):
        workflow = yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())
        cells = workflow["jobs"]["test"]["strategy"]["matrix"]["include"]
        oldest = next(cell for cell in cells if cell["python"] == python[1])
        assert oldest["torch"].startswith(f"torch=={torch[1]}.0")
        assert any(cell["torch"] == "torch" for cell in cells)  # the newest


def test_nothing_is_published_by_itself() -> None:
    publish = yaml.safe_load((ROOT / ".github" / "workflows" / "wheels.yml").read_text())["jobs"]["publish"]
    asked = "(vars.PUBLISH == 'yes' || vars.PUBLISH == 'test')"
    assert publish["if"] == f"{asked} && startsWith(github.ref, 'refs/tags/v')"
    for place in (publish["environment"], publish["env"]["TWINE_REPOSITORY"]):
        assert place == "${{ vars.PUBLISH == 'yes' && 'pypi' || 'testpypi' }}"
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["needs"] == "test"


def test_the_version_is_the_same_everywhere() -> None:
    release = runpy.run_path(str(ROOT / "tools" / "release.py"))
    assert release["problems"]("refs/heads/main") == []
    assert release["problems"]("refs/tags/v0.0.0")[0].startswith("the tag is v0.0.0, memkern/_version.py has ")
    done = subprocess.run([sys.executable, ROOT / "tools" / "release.py"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "usage: python tools/release.py version REF | links https://... REF\n"


def test_an_index_gets_whole_links() -> None:
    release = runpy.run_path(str(ROOT / "tools" / "release.py"))
    text = (ROOT / "README.md").read_text()
    whole = release["with_links"](text, "https://host/o/memkern", "refs/tags/v1.2.3")
    assert "![Bytes before" in whole
    assert "(https://host/o/memkern/raw/v1.2.3/docs/assets/saves.png)" in whole
    assert "(https://host/o/memkern/blob/v1.2.3/docs/gpu-checks.md#on-an-h200)" in whole
    assert "[examples/](https://host/o/memkern/tree/v1.2.3/examples)" in whole
    links = re.findall(r"\]\(([^)]+)\)", whole)
    assert len(links) == len(re.findall(r"\]\(([^)]+)\)", text))
    assert all(link.startswith(("https://", "#")) for link in links)
    project = release["with_urls"]((ROOT / "pyproject.toml").read_text(), "https://host/o/memkern")
    assert project.count("[project.urls]") == 1
    assert 'Repository = "https://host/o/memkern"' in project
