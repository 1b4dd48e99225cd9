"""`python -m weightbeam`: the command line, where no console script is installed."""

from weightbeam.pipelines.entry import run

if __name__ == "__main__":
    run()
