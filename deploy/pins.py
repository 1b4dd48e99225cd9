"""What the image is made of, pinned by hashes: the packages' files in `requirements.txt`, the base images in the
Dockerfile.

    python -m deploy.pins packages    # asks the package index for the hashes of what constraints.txt names: make pin-packages
    python -m deploy.pins images      # asks the registries for the digests behind the tags, by docker: make pin-images

A tag may be moved to another image by whoever owns it. The project's Dockerfile names tags; pin them in your own copy.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FOLDER = Path(__file__).parent
REQUIREMENTS, CONSTRAINTS, DOCKERFILE = FOLDER / "requirements.txt", FOLDER / "constraints.txt", FOLDER / "Dockerfile"
EXTRAS = ".[follow,gcp]"
HEAD = "# What pip installs into the image, of constraints.txt, file by file, for Python 3.11 on x86-64 Linux; `make pin-packages` writes it.\n"
FROM = re.compile(r"^FROM (?P<image>[^\s@]+)(?:@sha256:[0-9a-f]{64})?", re.MULTILINE)


def requirements_of(report: Mapping[str, Any]) -> str:
    """A requirements file with hashes, of what `pip install --dry-run --report` says.

    Raises:
      ValueError: a package has no hash.
    """
    packages = [
        item for item in report["install"] if "dir_info" not in item["download_info"]
    ]  # but for the project itself
    lines, wanted = [], extras_of(packages)
    for item in packages:
        name, version, where = item["metadata"]["name"], item["metadata"]["version"], item["download_info"]
        if "sha256" not in where.get("archive_info", {}).get("hashes", {}):
            raise ValueError(f"{name}: the index says no sha256")
        pin = f"{version} --hash=sha256:{where['archive_info']['hashes']['sha256']}\n"
        lines += [f"{name}{extras}=={pin}" for extras in ("", *sorted(wanted.get(canonicalize_name(name), ())))]
    return HEAD + "".join(sorted(lines, key=str.lower))


def extras_of(packages: Iterable[Mapping[str, Any]]) -> dict[str, set[str]]:
    """The extras that packages ask of each other, by name: `{"google-auth": {"[pyopenssl]", "[requests]"}}`.

    An older pip (23.2, of Python 3.11.7) wants a pin of each spelling where hashes are required.
    """
    wanted: dict[str, set[str]] = defaultdict(set)
    for package in packages:
        for text in package["metadata"].get("requires_dist", ()):
            asked = Requirement(text)
            taken = package.get("requested_extras") or [""]
            if asked.extras and (asked.marker is None or any(asked.marker.evaluate({"extra": each}) for each in taken)):
                wanted[canonicalize_name(asked.name)].add(f"[{','.join(sorted(asked.extras))}]")
    return wanted


def pin_packages() -> None:
    """Writes `requirements.txt` anew."""
    with tempfile.NamedTemporaryFile() as report:
        command = [
            "install",
            "--dry-run",
            "--ignore-installed",
            "--quiet",
            "--report",
            report.name,
            "--constraint",
            str(CONSTRAINTS),
            EXTRAS,
        ]
        subprocess.run([sys.executable, "-m", "pip", *command], cwd=FOLDER.parent, check=True)
        REQUIREMENTS.write_text(requirements_of(json.load(report)))


def pinned(dockerfile: str, digest_of: Callable[[str], str]) -> str:
    """A Dockerfile whose base images are named by tag and digest; those of earlier pins are looked up anew."""
    return FROM.sub(lambda found: f"FROM {found['image']}@{digest_of(found['image'])}", dockerfile)


def ask_registry(image: str) -> str:
    """The digest behind an image's tag, `sha256:…`."""
    command = ["docker", "buildx", "imagetools", "inspect", "--format", "{{.Manifest.Digest}}", image]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("packages", "images"))
    if parser.parse_args().what == "packages":
        pin_packages()
    else:
        DOCKERFILE.write_text(pinned(DOCKERFILE.read_text(), ask_registry))


if __name__ == "__main__":
    main()
