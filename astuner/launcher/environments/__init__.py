"""Isolated environments for the backbones whose packages cannot live with each other's."""
