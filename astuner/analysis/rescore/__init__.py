"""`astuner rescore`: scores a recorded run with another judge, without a model, and compares the rewards."""
