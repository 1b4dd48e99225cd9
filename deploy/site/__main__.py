"""`python -m deploy.site`: builds the site in `out/site/html`, and stops at the first thing that a reader would trip over.

With `--publish FOLDER` the site goes into FOLDER/VERSION, beside those that are there, and `versions.json` lists them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from packaging.version import Version

import weightbeam
from deploy.site.code import undocumented
from deploy.site.pages import write_pages

ROOT = Path(__file__).parents[2]
OUT = ROOT / "out" / "site"
FORWARD = '<!doctype html><meta http-equiv="refresh" content="0; url={version}/"><a href="{version}/">Weightbeam {version}</a>\n'


def build(run_notebooks: bool = True) -> Path:
    """Builds the site; every warning of Sphinx is an error: a link that leads nowhere, a page that no contents list.

    Args:
      run_notebooks: whether they are run anew; without it they show no output.

    Returns:
      The folder of the pages.
    """
    if missing := undocumented():
        raise SystemExit("\n".join(["these docstrings lack something:", *missing]))
    source, html = OUT / "source", OUT / "html"
    shutil.rmtree(source, ignore_errors=True)
    write_pages(source)
    execution = "force" if run_notebooks else "off"
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", "--builder", "html"]
    places = ["--conf-dir", str(Path(__file__).parent), str(source), str(html)]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # notebooks call `weightbeam`
    subprocess.run(
        [*command, "-D", f"nb_execution_mode={execution}", *places], check=True, env=os.environ | {"PATH": path}
    )
    return html


def publish(html: Path, folder: Path, version: str) -> None:
    """Puts a site beside those of other versions, which its list then names; the folder's own page leads to the newest."""
    shutil.rmtree(folder / version, ignore_errors=True)
    shutil.copytree(html, folder / version)
    versions = sorted((place.parent.name for place in folder.glob("*/index.html")), key=Version, reverse=True)
    (folder / "versions.json").write_text(json.dumps(versions))
    (folder / "index.html").write_text(FORWARD.format(version=versions[0]))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser("python -m deploy.site", description=__doc__)
    parser.add_argument("--publish", type=Path, metavar="FOLDER", help="a folder of sites, one for each version")
    parser.add_argument("--without_notebooks", action="store_true", help="don't run them: a draft, in a minute")
    args = parser.parse_args()
    html = build(run_notebooks=not args.without_notebooks)
    if args.publish:
        publish(html, args.publish, weightbeam.__version__)
    print(f"{html / 'index.html'}")


if __name__ == "__main__":
    main()
