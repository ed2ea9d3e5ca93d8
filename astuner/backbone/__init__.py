"""Backbones, which run episodes and train the model. A backbone is imported when it is first used."""
