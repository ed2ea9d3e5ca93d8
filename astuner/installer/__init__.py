"""Separate virtual environments for the backbones whose packages conflict with each other."""
