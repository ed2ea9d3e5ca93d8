"""Environments of other packages: one module for each family, with `create(name, **params)` and `names()`."""
