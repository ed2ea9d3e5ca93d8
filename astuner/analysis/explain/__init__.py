"""`astuner explain`: how the calls of a run became training samples; `astuner bisect`: where two runs differ."""
