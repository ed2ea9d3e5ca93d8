"""The verl backbone: verl's Ray trainer, on one machine or many."""
