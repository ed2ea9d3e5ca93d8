"""Trains with Trinity-RFT's explorer and trainer on Ray, asynchronously."""
