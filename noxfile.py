"""`make test-all`: the tests on every Python that Weightbeam supports; one that isn't installed is skipped.

nox -s tests-3.13 -- tests/formats      # one of them, and what follows `--` goes to pytest
"""

import nox

PYTHONS = ("3.11", "3.12", "3.13")  # the classifiers of pyproject.toml

nox.options.error_on_missing_interpreters = False


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """All tests, in an environment with everything that `make test` installs."""
    session.install("--editable", ".[test,models]")
    session.run("python", "-m", "pytest", *(session.posargs or ["-n", "2", "-m", "not slow"]))
