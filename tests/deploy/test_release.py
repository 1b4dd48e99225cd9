"""A release: what stands against one, and that the commands of docs/howto/releasing.md leave nothing; the files of .github
fit their schemas, and what they run is there; wheel and sdist pass their linters (`make dist`).
"""

from __future__ import annotations

import datetime
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from processes import run

import weightbeam
from deploy import release

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
FILES = ("pyproject.toml", "CHANGELOG.md", "CITATION.cff", "weightbeam/__init__.py", "formats/text/installing.py")
ADDRESS = "https://example.org/someone/weightbeam"
DAY = datetime.date(2027, 1, 2)
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
# which of check-jsonschema's own schemas is whose
SCHEMAS = {
    **dict.fromkeys(WORKFLOWS, "vendor.github-workflows"),
    **{
        path: "vendor.github-issue-forms"
        for path in sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml"))
        if path.name != "config.yml"
    },
    GITHUB / "ISSUE_TEMPLATE" / "config.yml": "vendor.github-issue-config",
    GITHUB / "dependabot.yml": "vendor.dependabot",
    ROOT / "CITATION.cff": "vendor.citation-file-format",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_before_a_release_all_of_it_is_said(project: Path) -> None:
    """Today there is no address, and so cards link to nothing, and messages install from a folder."""
    found = "\n".join(release.problems(project, "v9.9.9"))
    for words in (
        f"version {weightbeam.__version__}, the tag says 9.9.9",
        "has no [9.9.9]",
        "[project.urls] has no",
        "installing.py",
        "CITATION.cff",
    ):
        assert words in found
    assert "should be v1.2.3" in "\n".join(release.problems(project, "9.9"))
    assert release.main(["check", "v9.9.9"], project) == 1


def test_the_steps_of_a_release_leave_nothing(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Twice, since a second release finds the first one's lines."""
    release.main(["address", f"{ADDRESS}/"], project)
    for number in ("9.9.9rc1", "9.9.9"):
        release.set_version(project, number, DAY)
        put = (project / "CHANGELOG.md").read_text()
        (project / "CHANGELOG.md").write_text(
            put.replace(f"## [{number}] - 2027-01-02\n", f"## [{number}] - 2027-01-02\n\n### Added\n\n- {number}.\n")
        )
        assert release.problems(project, f"v{number}", ADDRESS) == []
    assert release.problems(project, "v9.9.9", "https://example.org/another") != []
    assert release.main(["check", "v9.9.9", ADDRESS], project) == 0
    capsys.readouterr()
    assert release.main(["notes", "v9.9.9"], project) == 0
    assert capsys.readouterr().out == "### Added\n\n- 9.9.9.\n"
    with pytest.raises(SystemExit, match=r"should be 1\.2\.3"):
        release.set_version(project, "latest", DAY)


@pytest.mark.parametrize("path", SCHEMAS, ids=lambda path: path.name)
def test_files_of_github_fit_their_schemas(path: Path) -> None:
    run(str(Path(sys.executable).with_name("check-jsonschema")), "--builtin-schema", SCHEMAS[path], str(path), status=0)


def steps(path: Path) -> list[dict]:
    return [step for job in yaml.safe_load(path.read_text())["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_what_workflows_run_is_there(path: Path) -> None:
    """Targets of make, modules and scripts; no job waits for ever, none may do more than it says, and no checkout keeps a token."""
    made = yaml.safe_load(path.read_text())
    assert made["permissions"] == {"contents": "read"}
    assert all("timeout-minutes" in job for job in made["jobs"].values())
    text = "\n".join(step.get("run", "") for step in steps(path))
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make ([\w-]+)", text)) <= targets
    assert all((ROOT / name).is_file() for name in re.findall(r"^(\.ci/\w+)", text, re.MULTILINE))
    assert all(
        (ROOT / name.replace(".", "/")).with_suffix(".py").is_file() for name in re.findall(r"-m (deploy\.\w+)", text)
    )
    checkouts = [step for step in steps(path) if step.get("uses", "").startswith("actions/checkout@")]
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)
    assert not re.search(r"\$\{\{ *github\.(event|head_ref)", text), "what a stranger says would be run"


def test_only_who_publishes_may() -> None:
    """Rights by job: nothing that runs the project's code can publish."""
    jobs = yaml.safe_load((GITHUB / "workflows" / "release.yml").read_text())["jobs"]
    rights = {name: set(job.get("permissions", {})) - {"contents"} for name, job in jobs.items()}
    assert rights == {
        "check": set(),
        "build": set(),
        "publish": {"id-token"},
        "image": {"packages", "id-token"},
        "page": set(),
    }
    assert not any("run" in step for step in jobs["publish"]["steps"])


def test_actionlint() -> None:
    """Where it is installed: `go install github.com/rhysd/actionlint/cmd/actionlint@v1.7.12`."""
    if (found := shutil.which("actionlint")) is None:
        pytest.skip("no actionlint on this machine's path; the schemas were compared")
    run(found, *map(str, WORKFLOWS), cwd=ROOT, status=0)


@pytest.mark.slow("builds the package once more, in an environment that it fetches")
def test_wheel_and_sdist(tmp_path: Path) -> None:
    run("make", "dist", f"DIST={tmp_path}", cwd=ROOT, status=0)
    assert {path.suffix for path in tmp_path.iterdir()} == {".whl", ".gz"}


def test_the_version_is_said_where_it_is_cited() -> None:
    """Before a release CITATION.cff has none; after one it has the package's."""
    said = yaml.safe_load((ROOT / "CITATION.cff").read_text()).get("version")
    assert said in (None, weightbeam.__version__)
    assert json.dumps(said)
