"""The training loop and the other parts that all training backbones share."""
