"""The trinity backbone: Trinity-RFT's explorer and trainer, which work at the same time."""
