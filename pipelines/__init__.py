"""The API, the command line and their commands."""
