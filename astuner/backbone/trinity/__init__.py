"""The trinity backbone: trains asynchronously with Trinity-RFT's explorer and trainer on Ray."""
