"""The command line's options, without Beam: `--help` must not wait for it."""
