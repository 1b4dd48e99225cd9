"""The manual as a site: the pages of `docs/`, what the code says of itself, and the notebooks, which are run.
`make docs` builds it (`python -m deploy.site`).
"""
