"""On-policy distillation: a teacher scores the tokens that the model in training has sampled."""
