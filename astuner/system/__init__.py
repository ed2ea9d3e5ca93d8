"""The process and its surroundings: signals, clock, secrets, console, addresses and other processes."""
