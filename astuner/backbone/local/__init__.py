"""The local backbone: PyTorch in this process."""
