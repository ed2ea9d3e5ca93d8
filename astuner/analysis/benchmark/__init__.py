"""`astuner bench`: runs a suite over backbones and seeds, reports the gains with intervals, and compares results."""
