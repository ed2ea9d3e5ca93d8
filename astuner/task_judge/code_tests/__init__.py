"""Unit tests of code that a model has written, in a sandbox."""
