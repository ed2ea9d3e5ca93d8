"""Starting runs."""

import os

# For PyTorch's OpenMP, which reads it when PyTorch is first imported: a thread without work sleeps after some 30 µs,
# where it would keep its core busy for milliseconds. Beside other busy processes (an agent's tools, say) a step of
# a small model takes several times as long otherwise; alone it takes a twentieth longer.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
