"""The documentation site: what mkdocs does not do by itself. `mkdocs.yml` names `hooks.py`; `make docs` builds."""
