"""Checks for faults that raise no error. A finding says what is wrong, with the evidence, and how to fix it."""
